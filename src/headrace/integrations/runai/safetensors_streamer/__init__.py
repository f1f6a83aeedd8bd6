"""Where programs import Run:ai's `safetensors_streamer` from."""
