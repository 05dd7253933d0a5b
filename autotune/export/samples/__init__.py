"""Samples of a dataset as people have them: chat, pairs, instructions, texts, texts with labels.

Each module imports those before it: values, shapes, formats, files, messages, rows, read. train_py puts what
follows their imports into train.py in this order, which knows no autotune; the worker counts lengths with
the same functions. So: the standard library only, and `datasets` for what is neither text nor JSON.
"""
