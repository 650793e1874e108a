"""kvscope's monitor: turns what an engine says about its KV memory into state, judgement and explanation."""
