"""What every participant shares, and the client. Never imports torch.

    from swarm import Client
    with Client("192.168.1.20:7070") as client:
        for piece in client.stream("Why is the sky blue?", max_tokens=100):
            print(piece.text, end="", flush=True)
"""

from swarm.blocking import Client
from swarm.client import AsyncClient, join_addresses
from swarm.errors import SwarmError
from swarm.generation import Completion, Generation, Piece

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Completion", "Generation", "Piece", "SwarmError", "__version__", "join_addresses"]
