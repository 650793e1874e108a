"""Models: weights from a local directory, or none at all. `load` is the way in.

loading.py     from a directory or a name to a LoadedModel
tokens.py      tokenizers: the directory's own, or a token a byte
layers.py      what a model needs of the runner, and rotary positions
llama.py       Llama, Mistral, Qwen2        gpt2.py   GPT-2        tiny.py   the model that the engine brings itself
"""

from engine.models.loading import LoadedModel, ModelConfig, load

__all__ = ["LoadedModel", "ModelConfig", "load"]
