"""Hostile input for every parser: valid samples, what is done to them, and what must come of it.

    values.py    any value that a message or record may hold, drawn from the codecs that it travels by
    samples.py   valid files: headers, tokenizers, templates, configurations
    mutate.py    bytes and trees, changed as an attacker or a bad disk would
    targets.py   the parsers: valid inputs, how to feed one, and which errors it may raise
    __main__.py  python -m tests.fuzz: as many inputs as there is time for

An input follows from (seed, target, number) alone, so a failure is replayed without any file.
"""
