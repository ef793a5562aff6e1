"""A real swarm of a tiny random model: several `PeerService`s in one event loop, real sockets on loopback.

The loop runs in a thread of its own, so that tests may block (the synchronous client) or await in a loop of
their own, and a swarm can serve a whole module. What is right comes from transformers on the same files.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from peer.compiled import prepare
from peer.hop import HopConfig
from peer.service import PeerOptions, PeerService
from swarm import AsyncClient, Client
from swarm.state import StateDir

LAYERS = 6
CONTEXT = 1024
WITHIN_S = 30.0  # far more than needed on a busy machine; only a hang reaches it
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 1, (2, 4)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = (
    "t h",
    "e r",
    "Ġ t",
    "Ġ a",
    "o n",
    "Ã ©",
    "Ġ Ã",
    "ä ¸",
    "ðŁ ĺ",
    "ð Ł",
)  # some end within a character
T = TypeVar("T")


# ---------------------------------------------------------------- the checkpoints


def write_tokenizer(folder: Path, *, template: bool) -> int:
    """Byte-level BPE in which every byte is a token. Returns the vocabulary's size."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate([*SPECIAL, *letters])}
    merges = []
    for merge in sorted(MERGES, key=lambda pair: len(pair)):
        left, right = merge.split()
        if left in vocab and right in vocab:
            merges.append((left, right))
            vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template:
        config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return len(vocab)


def rare_ids(folder: Path) -> list[int]:
    """Special tokens, and bytes (or several) that aren't ASCII."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spelled = [tokenizer.id_to_token(number) or "" for number in range(tokenizer.get_vocab_size())]
    return [n for n, text in enumerate(spelled) if text in SPECIAL or not text.isascii()]


def write_model(
    folder: Path,
    *,
    seed: int,
    eos: Sequence[int] = EOS,
    template: bool = True,
    kind: str = "llama",
    shape: Mapping[str, Any] | None = None,
    **generation: Any,
) -> Path:
    """A llama, or another kind, in Hugging Face layout. Its weights are large enough for logits that differ clearly.

    shape: of its config, beside what all have here.

    The rows of the head for `eos` ids and for bytes beyond ASCII are scaled down: a greedy answer rather goes
    on, and is mostly text.
    """
    vocab = write_tokenizer(folder, template=template)
    config = CONFIG_MAPPING[kind](
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=BOS, eos_token_id=EOS[0], pad_token_id=0,
        **(shape or {}),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
        model.lm_head.weight[rare_ids(folder)] *= 0.6
    model.generation_config.update(eos_token_id=list(eos), **generation)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": BOS, "eos_token_id": list(eos), **generation}), encoding="utf-8"
    )
    return folder


class Oracle:
    """transformers on the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @cached_property
    def model(self) -> PreTrainedModel:
        # eager: the one implementation that honours soft-capping and sinks in every release
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def chat_ids(self, prompt: str | list[dict[str, str]]) -> list[int]:
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        made = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        return list(made["input_ids"])

    def raw_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def greedy(self, prompt_ids: list[int], tokens: int) -> list[int]:
        """What follows: `tokens` ids, or up to and with an end-of-text id."""
        ids = torch.tensor([prompt_ids])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return list(out[0, len(prompt_ids) :].tolist())

    def follows(self, ids: Sequence[int], start: int, stop: int | None = None) -> bool:
        """Whether each id from position `start` on (up to `stop`, what lies behind it only makes the text longer) is
        what greedy decoding makes of those before it, or a tie."""
        stop = len(ids) if stop is None else stop
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0, start - 1 : stop - 1]
        chosen = logits.gather(1, torch.tensor(ids[start:stop])[:, None])[:, 0]
        return bool((chosen >= logits.max(-1).values - 1e-4).all())

    def text(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


# ---------------------------------------------------------------- the swarm


class Background:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tiny swarms", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WITHIN_S)

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function in the loop, where what it reads can't change meanwhile."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(lambda: answer.set_result(function()))
        return answer.result(WITHIN_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class TinySwarm:
    """Peers by name. The first is the one to join."""

    def __init__(self, background: Background, home: Path) -> None:
        self._background, self._home = background, home
        self.peers: dict[str, PeerService] = {}
        prepare(torch.float32, torch.float32)  # the first one in a checkout compiles, longer than a start may take

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._background.loop

    @property
    def address(self) -> str:
        return self.address_of(next(iter(self.peers)))

    def address_of(self, name: str) -> str:
        return f"127.0.0.1:{self.peers[name].transport.port}"

    def start(
        self, name: str, model: Path, layers: str, *, config: HopConfig | None = None, **options: Any
    ) -> PeerService:
        """Start one peer and wait until it serves."""
        return self._background.run(self._start(name, model, layers, config, options))

    def start_all(
        self, model: Path, spans: dict[str, str], *, config: HopConfig | None = None, **options: Any
    ) -> None:
        for name, layers in spans.items():
            self.start(name, model, layers, config=config, **options)
        self._background.run(self._agree())

    async def _start(
        self, name: str, model: Path, layers: str, config: HopConfig | None, options: dict[str, Any]
    ) -> PeerService:
        join = (self.address,) if self.peers else ()
        made = PeerService(
            PeerOptions(
                str(model), join=join, host="127.0.0.1", port=0, memory="256MiB", layers=layers, device="cpu",
                threads=1, name=name, **options,
            ),
            state=StateDir.open(self._home),
        )  # fmt: skip
        made.config = config or made.config
        await made.start()
        self.peers[name] = made
        return made

    async def _agree(self) -> None:
        """Until the first peer, which clients join, shows all as serving."""
        node = next(iter(self.peers.values())).node
        async with asyncio.timeout(WITHIN_S):
            while len([e for e in node.entries() if e.heartbeat.state == "serving"]) < len(self.peers):
                await node.changed()

    # ------------------------------------------------------------ looking inside

    def call(self, function: Callable[[], T]) -> T:
        return self._background.call(function)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._background.run(work)

    def held(self) -> dict[str, int]:
        """Sessions held, by peer, only those that hold some."""
        return self.call(
            lambda: {name: len(p.server.runs) for name, p in self.peers.items() if p.server.runs}
        )

    def empty(self) -> None:
        """Wait until no peer holds a session and all KV is back. Fails when it takes too long."""
        self._background.run(self._empty(tuple(self.peers)))

    async def emptied(self) -> None:
        """`empty` for a test with a loop of its own, which must go on meanwhile."""
        await asyncio.to_thread(self.empty)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, looked at in the swarm's loop."""
        await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._until(condition), self._background.loop)
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # there is no event for what goes on inside

    async def _empty(self, names: Sequence[str]) -> None:
        for name in names:
            peer = self.peers[name]
            async with asyncio.timeout(WITHIN_S):
                await peer.server.emptied.wait()
            assert not peer.server.runs
            assert (peer.pool.ledger.used, len(peer.pool.ledger)) == (0, 0), f"{name} keeps KV of nobody"

    def evict(self, name: str) -> None:
        """Let go of all sessions there, as if their leases were over."""
        self.call(lambda: [run.evict() for run in list(self.peers[name].server.runs.values())])

    # ------------------------------------------------------------ ends

    def crash(self, name: str) -> None:
        """Without a word to anybody, as a process that is killed."""
        self._background.run(self._crash(self.peers.pop(name)))

    async def _crash(self, peer: PeerService) -> None:
        for link in list(peer.transport._sockets):
            link.abort()
        await peer.node.close()  # so that nothing is dialled again to say goodbye
        await peer.transport.close()
        await peer.close()

    def drain(self, name: str, within_s: float = WITHIN_S) -> None:
        self._background.run(self.peers.pop(name).drain(within_s))

    def close(self) -> None:
        for name in reversed(list(self.peers)):
            self._background.run(self.peers.pop(name).close())


# ---------------------------------------------------------------- what tests share

CHAINS = {"one": {"one": "0:6"}, "three": {"a": "0:2", "b": "2:4", "c": "4:6"}}
CHAINS["five"] = {"v": "0:1", "w": "1:2", "x": "2:3", "y": "3:4", "z": "4:6"}
PATIENT = HopConfig(lease_s=3600.0, grace_after_s=3600.0)  # what is freed was closed: no lease ends in a test
DEFAULTS = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}


class Tiny:
    """Models and swarms, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._folder = folder
        self._background = Background()
        self._swarms: list[TinySwarm] = []
        self._homes = itertools.count()

    @cached_property
    def model(self) -> Path:
        return write_model(self._folder / "tiny", seed=3)

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.model)

    @cached_property
    def bare(self) -> Path:
        """Another model: no chat template, sampling by default."""
        return write_model(self._folder / "bare", seed=4, template=False, do_sample=True, **DEFAULTS)

    @cached_property
    def swarm(self) -> TinySwarm:
        """Nine peers of one model: three chains that share nothing. Clients choose with `only`."""
        made = self.new_swarm()
        for spans in CHAINS.values():
            made.start_all(self.model, spans, config=PATIENT)
        return made

    @cached_property
    def mixed(self) -> TinySwarm:
        """Two models in one swarm, a peer each."""
        made = self.new_swarm()
        made.start_all(self.model, {"tiny": "0:6"}, config=PATIENT)
        made.start_all(self.bare, {"bare": "0:6"}, config=PATIENT)
        return made

    def new_swarm(self) -> TinySwarm:
        """For tests that break something. Close it."""
        made = TinySwarm(self._background, self.new_home())
        self._swarms.append(made)
        return made

    def new_home(self) -> Path:
        return self._folder / f"home{next(self._homes)}"

    def client(self, swarm: TinySwarm | None = None, chain: str = "", **options: Any) -> AsyncClient:
        swarm = swarm or self.swarm
        return AsyncClient(swarm.address, home=self.new_home(), only=CHAINS.get(chain, ()), **options)

    def blocking_client(self, swarm: TinySwarm | None = None, chain: str = "", **options: Any) -> Client:
        swarm = swarm or self.swarm
        return Client(swarm.address, home=self.new_home(), only=CHAINS.get(chain, ()), **options)

    def close(self) -> None:
        try:
            for swarm in self._swarms:
                swarm.close()
        finally:
            self._background.close()
