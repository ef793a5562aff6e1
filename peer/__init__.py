"""Running a peer. torch and transformers live here only."""

import os

# Before huggingface_hub is imported: it would tell the hub which torch is here and which program runs it, and ask for a
# list of such programs first. Who wants that says so in the environment.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
