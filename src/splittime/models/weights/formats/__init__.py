"""Published layouts of quantised safetensors: what a `quantization_config` says, and where a weight's integers lie."""
