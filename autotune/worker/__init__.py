"""The code that runs in child processes: the only home of torch, transformers, peft and bitsandbytes."""
