"""Running a peer. torch and transformers live here only."""
