// llama.cpp under the line protocol of `protocol.py`, linked against a built libllama: contender_llama MODEL.gguf THREADS
// REPACK
//
// Each cell gets a context of its own, made and warmed by one token before the clock starts: streams as llama.cpp's own
// batched benchmark keeps them (one KV stream a sequence, chunks of 512 tokens in batches of 2048, flash attention and
// KV type as by default). REPACK 1, llama.cpp's default: weights in the layout of the fastest kernels, of AMX where the
// processor has it; 0: as they lie in the file. The greedy choice over the logits is inside the measured time, as it is for the others.
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

using json = nlohmann::json;
using Clock = std::chrono::steady_clock;

static double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Streams {
  public:
    Streams(llama_model * model, int count, int prompt_tokens, int new_tokens, int threads, unsigned seed)
        : vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))), prompt_(prompt_tokens), next_(count),
          random_(seed), batch_(llama_batch_init(2048, 0, 1)) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = count * (prompt_tokens + new_tokens + 1);
        params.n_seq_max = count;
        params.n_batch = 2048;
        params.n_ubatch = 512;
        params.n_threads = params.n_threads_batch = threads;
        context_ = llama_init_from_model(model, params);
        if (!context_) throw std::runtime_error("no context");
        add(random_id(), 0, 0, true);
        decode();
        llama_memory_clear(llama_get_memory(context_), true);
    }
    ~Streams() {
        llama_batch_free(batch_);
        llama_free(context_);
    }

    // All prompts, and the first token of each.
    void prefill() {
        for (int stream = 0; stream < (int) next_.size(); stream++) {
            if (batch_.n_tokens + prompt_ > 2048) flush();
            for (int at = 0; at < prompt_; at++) add(random_id(), at, stream, at + 1 == prompt_);
            wanted_.push_back(stream);
        }
        flush();
        position_ = prompt_;
    }

    // One more token for every stream.
    void step() {
        for (int stream = 0; stream < (int) next_.size(); stream++) {
            add(next_[stream], position_, stream, true);
            wanted_.push_back(stream);
        }
        position_++;
        flush();
    }

  private:
    void add(int id, int position, int stream, bool wants_logits) {
        const int i = batch_.n_tokens++;
        batch_.token[i] = id;
        batch_.pos[i] = position;
        batch_.n_seq_id[i] = 1;
        batch_.seq_id[i][0] = stream;
        batch_.logits[i] = wants_logits;
        if (wants_logits) rows_.push_back(i);
    }

    void flush() {
        const std::vector<int> rows = rows_;
        decode();
        for (size_t i = 0; i < rows.size(); i++) {
            const float * logits = llama_get_logits_ith(context_, rows[i]);
            next_[wanted_[i]] = (int) (std::max_element(logits, logits + vocab_) - logits);
        }
        wanted_.clear();
    }

    void decode() {
        if (llama_decode(context_, batch_) != 0) throw std::runtime_error("llama_decode failed");
        llama_synchronize(context_);
        batch_.n_tokens = 0;
        rows_.clear();
    }

    int random_id() { return 5 + (int) (random_() % 30000); }

    llama_context * context_ = nullptr;
    int vocab_, prompt_, position_ = 0;
    std::vector<int> next_, wanted_, rows_;
    std::mt19937 random_;
    llama_batch batch_;
};

static json run(llama_model * model, int threads, const json & cell) {
    const bool is_prefill = cell.at("cell") == "prefill";
    const int batch = is_prefill ? 1 : cell.at("batch").get<int>();
    const int prompt = cell.at(is_prefill ? "tokens" : "prompt_tokens").get<int>();
    const int count = is_prefill ? 1 : cell.at("new_tokens").get<int>();
    Streams streams(model, batch, prompt, count, threads, cell.value("seed", 0u));
    Clock::time_point begin = Clock::now();
    streams.prefill();
    double taken = seconds_since(begin);
    if (is_prefill) return {{"seconds", taken}, {"tokens_per_s", prompt / taken}};
    begin = Clock::now();
    for (int i = 1; i < count; i++) streams.step();
    taken = seconds_since(begin);
    return {{"seconds", taken}, {"tokens_per_s", batch * (count - 1) / taken}};
}

int main(int argc, char ** argv) {
    if (argc != 4) return 2;
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) std::cerr << text;
    }, nullptr);
    llama_backend_init();
    const Clock::time_point begin = Clock::now();
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts = std::string(argv[3]) != "0";
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!model) return 1;
    char name[128] = "";
    llama_model_desc(model, name, sizeof name);
    json ready = {{"ready", true}, {"load_s", seconds_since(begin)}, {"about", {{"model", name}, {"system", llama_print_system_info()}}}};
    std::cout << ready.dump() << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
        json answer;
        try {
            answer = run(model, std::stoi(argv[2]), json::parse(line));
        } catch (const std::exception & error) {
            answer = {{"error", error.what()}};
        }
        std::cout << answer.dump() << std::endl;
    }
    llama_model_free(model);
    llama_backend_free();
}
