"""Runs in a child process: the only home of torch, transformers, peft and bitsandbytes."""
