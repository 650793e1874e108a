"""kvscope's monitor: turns an engine's events about its KV memory into state, judgement and explanation."""
