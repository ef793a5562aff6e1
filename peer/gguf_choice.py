"""Which of some GGUF files are meant, and which belong together.

    model.gguf                     that file; of a split one any part means all of them
    ./directory                    the one model whose files are in it
    org/name:Q4_K_M                of a hub repository's files the one so called
    org/name/folder/model.gguf     that file of a hub repository

Decided from names alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from peer.layout import CONFIG, WEIGHTS, WEIGHTS_INDEX, ModelFiles
from swarm.errors import BrokenModel, ModelNotFound, UsageError

SUFFIX = ".gguf"
LISTED = 6  # names in an error
# beside a model, and none: projectors of images and sound, drafts, the statistics of a quantisation
_SIDECARS = ("mmproj", "mtp-", "imatrix")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def gguf_parts(files: ModelFiles, wanted: str | None) -> tuple[str, ...]:
    """The files of the GGUF model that is meant; () where the model is in Hugging Face layout.

    wanted: a file's name, or what tells one from the others, such as its quantisation. Raises ModelError,
    UsageError where several could be meant.
    """
    names = files.sizes
    if wanted is None and CONFIG in names and (WEIGHTS in names or WEIGHTS_INDEX in names):
        return ()
    models = _models(names)
    if wanted is not None and wanted.lower().endswith(SUFFIX):
        return _complete(files, _stem_of(wanted), _beside(files, wanted, models))
    meant = list(models)
    if wanted is not None:
        meant = _called(wanted, models)
        if not meant:
            raise ModelNotFound(f"{files.label} has no GGUF file called {wanted}; {_there(models)}")
    if len(meant) > 1:
        raise _several(files, meant, models)
    return _complete(files, meant[0], models[meant[0]]) if meant else ()


def _beside(files: ModelFiles, wanted: str, models: Mapping[str, list[str]]) -> list[str]:
    """The file that was named, or what is there of the split model to which its name belongs."""
    part = _PART.fullmatch(wanted)
    if part is None and wanted in files.sizes:
        return [wanted]
    of_same = [name for name in models.get(_stem_of(wanted), ()) if _count_of(name) == _count_of(wanted)]
    if part is None or not of_same:
        raise ModelNotFound(f"{files.label} has no {wanted}; {_there(models)}")
    return of_same


def _count_of(name: str) -> str:
    """How many parts a part's name speaks of; "" of a whole model's."""
    match = _PART.fullmatch(name)
    return match["count"] if match else ""


def served_stem(part: str) -> str:
    """What a model in GGUF files is called: the file's name without folder, ending and number of the part."""
    return plain(_stem_of(part))


def plain(name: str) -> str:
    return name.rpartition("/")[2]


def _stem_of(name: str) -> str:
    match = _PART.fullmatch(name)
    return match["stem"] if match else name[: -len(SUFFIX)]


def _models(names: Iterable[str]) -> dict[str, list[str]]:
    """Files by model, parts in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(SUFFIX) and not plain(name).lower().startswith(_SIDECARS):
            models.setdefault(_stem_of(name), []).append(name)
    return models


def _complete(files: ModelFiles, stem: str, parts: list[str]) -> tuple[str, ...]:
    """Raises BrokenModel naming a missing part, or parts that don't belong together."""
    counts = sorted(set(map(_count_of, parts)))
    if len(counts) > 1:
        told = " and ".join(f"{int(count)} parts" if count else "one file" for count in counts)
        raise BrokenModel(f"{files.label} has {plain(stem)} both in {told}; keep one of them, or name a file")
    if not counts[0]:
        return tuple(parts)
    names = {int(match["number"]): name for name in parts if (match := _PART.fullmatch(name))}
    missing = [number for number in range(1, int(counts[0]) + 1) if number not in names]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BrokenModel(
            f"{files.label} lacks {plain(stem)}-{missing[0]:05}-of-{counts[0]}{SUFFIX}{more} "
            f"of the {int(counts[0])} parts of {plain(stem)}; fetch the missing parts"
        )
    return tuple(names[number] for number in sorted(names))


def _several(files: ModelFiles, meant: list[str], models: Mapping[str, list[str]]) -> UsageError:
    short = _short(models)
    told = [short[stem] for stem in meant]
    more = f" and {len(told) - LISTED} more" if len(told) > LISTED else ""
    if not files.is_remote:
        how = str(Path(files.label) / models[meant[0]][0])
    elif len(_called(told[0], models)) == 1:
        how = f"{files.label}:{told[0]}"
    else:
        how = f"{files.label}/{models[meant[0]][0]}"
    return UsageError(
        f"{files.label} has {len(meant)} models in GGUF files ({', '.join(told[:LISTED])}{more}); "
        f"say which: {how}"
    )


def _called(word: str, models: Collection[str]) -> list[str]:
    """The one of that name, else those in whose name, or folder, it is a word: Q4_K is none in tiny-Q4_K_M."""
    exact = [stem for stem, short in _short(models).items() if word.lower() in (short.lower(), stem.lower())]
    if len(exact) == 1:
        return exact
    pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [stem for stem in models if pattern.search(stem)]


def _short(models: Collection[str]) -> dict[str, str]:
    """What tells each model from the others, by stem: Q4_K_M and UD-Q4_K_M of two that begin alike."""
    common = _common([plain(stem) for stem in models]) if models else ""
    return {stem: plain(stem)[len(common) :] or plain(stem) for stem in models}


def _common(stems: list[str]) -> str:
    """What all names begin with, up to a sign that ends a word."""
    low, high = min(stems), max(stems)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False)))
    match = re.match(r".*[-.]", low[:same])
    return match[0] if match else ""


def _there(models: Mapping[str, list[str]]) -> str:
    if not models:
        return "it has no GGUF files"
    listed = [plain(stem) for stem in list(models)[:LISTED]]
    more = f" and {len(models) - LISTED} more" if len(models) > LISTED else ""
    return f"there are {', '.join(listed)}{more}"
