// Whether the tiles of AMX may be used. A processor that advertises them may still kill the process at their first use (seen
// with another engine on a virtual machine), and Linux permits them only to a process that asks. So a child process first
// tries the whole sequence, on a thread other than its first: permission, configuration, loads, products, stores, and a
// comparison. Only if that works does this process ask for them.
#include <string.h>

#include "splittime.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <string>
#include <type_traits>

#define ST_ISA amx
#define LANES 16
namespace ST_ISA {
static float f32_of_bf16(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
}  // namespace ST_ISA
#include "amx_tiles.h"

namespace {

constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
constexpr int NO_PERMISSION = 1, WRONG = 2;

bool has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned wanted = 1u << 24 | 1u << 25 | 1u << 22;  // tiles, their products of bytes, and of bfloat16
  return (d & wanted) == wanted && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Multiplies 16 x 64 signed bytes by 64 x 16 bytes, W, which come past the first-level cache, and compares the products with
// sums made one by one.
template <class W> bool bytes_are_right() {
  using namespace amx;
  int8_t x[16][64];
  W w[16][64];
  int32_t sums[16][16] = {};
  for (int i = 0; i < 1024; i++) x[i / 64][i % 64] = (int8_t)(i * 37), w[i / 64][i % 64] = (W)(i * 91 + 5);
  tile_zero<4>();
  tile_load<0>(x, 64), tile_load_far<2>(w, 64);
  if constexpr (std::is_signed_v<W>)
    tile_product_signed<4, 0, 2>();
  else
    tile_product_bytes<4, 0, 2>();
  tile_store<4>(sums, 64);
  bool right = true;
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      int32_t sum = 0;
      for (int k = 0; k < 64; k++) sum += x[m][k] * w[k / 4][4 * n + k % 4];
      right &= sum == sums[m][n];
    }
  return right;
}

// Multiplies 16 x 32 numbers of bfloat16 by 32 x 16, and compares the products with sums made one by one.
bool halves_are_right() {
  using namespace amx;
  uint16_t halves[16][32];
  float products[16][16];
  for (int i = 0; i < 512; i++) halves[i / 32][i % 32] = (uint16_t)(0x3f80 + i % 7 * 16);  // 1 to 1.75
  tile_zero<4>();
  tile_load<0>(halves, 64), tile_load<2>(halves, 64);
  tile_product_bfloat16<4, 0, 2>();
  tile_store<4>(products, 64);
  bool right = true;
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum = 0;  // exact: small multiples of 2^-6
      for (int k = 0; k < 32; k++) sum += f32_of_bf16(halves[m][k]) * f32_of_bf16(halves[k / 2][2 * n + k % 2]);
      right &= sum == products[m][n];
    }
  return right;
}

void *try_tiles(void *is_right) {
  amx::tiles_begin(64);
  *(bool *)is_right = bytes_are_right<uint8_t>() && bytes_are_right<int8_t>() && halves_are_right();
  amx::tiles_end();
  return nullptr;
}

// Asks Linux for the tiles, for all threads of this process (Documentation/arch/x86/xstate.rst).
bool ask() { return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0; }

[[noreturn]] void be_the_child() {
  for (int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP}) signal(number, SIG_DFL);  // Python may have handlers
  const struct rlimit none = {0, 0};
  setrlimit(RLIMIT_CORE, &none);
  if (!ask()) _exit(NO_PERMISSION);
  bool is_right = false;
  pthread_t thread;
  if (pthread_create(&thread, nullptr, try_tiles, &is_right) || pthread_join(thread, nullptr)) _exit(WRONG);
  _exit(is_right ? 0 : WRONG);
}

// The child's status, or -1 if there was none within five seconds.
int await(pid_t child) {
  int status = 0;
  const struct timespec pause = {0, 200000};
  for (int i = 0; i < 25000; i++) {
    if (waitpid(child, &status, WNOHANG) == child) return status;
    nanosleep(&pause, nullptr);
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return -1;
}

std::string find_refusal() {
  if (!has_tiles()) return "the processor has no AMX";
  const pid_t child = fork();
  if (child < 0) return "no process could be started to try AMX in";
  if (child == 0) be_the_child();
  const int status = await(child);
  if (status == -1) return "AMX was tried in a process of its own, which did not end";
  if (WIFSIGNALED(status)) return "AMX was tried in a process of its own, which died of signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) == NO_PERMISSION || !ask()) return "the system does not permit AMX";
  return WEXITSTATUS(status) == 0 ? "" : "AMX was tried and gave wrong results";
}

const std::string &refusal() {
  static const std::string found = find_refusal();
  return found;
}

}  // namespace

bool amx_works() { return refusal().empty(); }
extern "C" const char *st_amx_refusal(void) { return refusal().c_str(); }

#else
bool amx_works() { return false; }
extern "C" const char *st_amx_refusal(void) { return "the processor has no AMX"; }
#endif
