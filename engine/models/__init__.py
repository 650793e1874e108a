"""Models: weights from a local directory, or none at all. `load_model` is the way in.

loading.py      from a directory or a name to a LoadedModel
checkpoint.py   the settings and weights in a directory
tokens.py       tokenizers: the directory's own, or a token a byte
layers.py       the interface of models and the runner, and rotary positions
llama.py        Llama, Mistral, Qwen2, Qwen3
gpt2.py         GPT-2        tiny.py   the model that the engine brings itself
"""

from .layers import ModelConfig
from .loading import LoadedModel, load_model

__all__ = ["LoadedModel", "ModelConfig", "load_model"]
