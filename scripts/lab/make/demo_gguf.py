"""Write the demo model as a GGUF file, which llama.cpp runs.

    .venv-llama/bin/python scripts/lab/make/demo_gguf.py demo.gguf     # ./scripts/test makes .venv-llama

It needs gguf and numpy alone. Greedy answers of llama.cpp with this file are those of the embedded engine: the weights
are the same, and so are the tokens of a text.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

MODEL = Path(__file__).parents[3] / "llmserve" / "demo" / "model"
PRE_TOKENIZER = "llama-bpe"
"""The pattern of llama.cpp's that splits most as the demo model's does: it differs only in that a space behind
punctuation belongs to the next word. Tokens such as `, ` are therefore user-defined: llama.cpp finds these before it
splits."""
SPACE_BEHIND = re.compile(r"Ġ?[^\w\sĠ]+Ġ")
DTYPES = {"F16": np.float16, "F32": np.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    write(parser.parse_args().output)


def write(output: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    writer = gguf.GGUFWriter(output, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_name("llmserve-demo")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    add_shape(writer, config)
    add_tokenizer(writer, config, json.loads((MODEL / "tokenizer.json").read_text()))
    writer.add_chat_template((MODEL / "chat_template.jinja").read_text())
    add_weights(writer, config, MODEL / "model.safetensors")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    names = {id_: name for name, id_ in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens, types = [], []
    for id_ in range(config["vocab_size"]):
        name = names[id_]
        if id_ in special:
            types.append(gguf.TokenType.CONTROL)
        elif SPACE_BEHIND.fullmatch(name):
            name = name.replace("Ġ", " ")  # user-defined tokens are written as the text has them
            types.append(gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL)
        tokens.append(name)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])


def add_weights(writer: gguf.GGUFWriter, config: dict[str, Any], file: Path) -> None:
    """A model without an output matrix of its own uses the embeddings, as llama.cpp does, too."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weights in read_safetensors(file).items():
        if name.endswith("q_proj.weight"):
            weights = interleaved(weights, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weights = interleaved(weights, config["num_key_value_heads"])
        if weights.ndim == 1:  # llama.cpp multiplies by norms in 32 bits
            weights = weights.astype(np.float32)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(weights))


def interleaved(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows in llama.cpp's order. transformers rotates row i of a head together with row i + size / 2, llama.cpp rows
    2 i and 2 i + 1.

    weights : (heads * size, inputs)
    """
    rows, inputs = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def read_safetensors(file: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a file: eight bytes with the length of a JSON table, the table, and the numbers."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:begin])
    table.pop("__metadata__", None)
    tensors = {}
    for name, entry in table.items():
        first, last = entry["data_offsets"]
        numbers = np.frombuffer(data[begin + first : begin + last], DTYPES[entry["dtype"]])
        tensors[name] = numbers.reshape(entry["shape"])
    return tensors


if __name__ == "__main__":
    main()
