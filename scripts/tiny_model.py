"""Write a model that needs no weights, for trying vLLM out without a download.

    python -m scripts.tiny_model DIR

Serve it with `--load-format dummy`: a Llama with one layer and random numbers. Its tokenizer knows the
words w0 to w319.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from kvscope.lab.on_vllm.scheduler_maker import TINY_LLAMA, save_config


def save_tokenizer(directory: Path) -> None:
    """One token a word: `w1 w2`."""
    words = Tokenizer(
        models.WordLevel({f"w{index}": index for index in range(TINY_LLAMA["vocab_size"])}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m scripts.tiny_model DIR")
    save_tokenizer(save_config(Path(sys.argv[1])))
