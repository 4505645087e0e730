"""A trained network -> the folder that serves: ONNX, readable without torch.

model.onnx            32-bit, for GPUs, and for CPUs if 8 bits lose too much accuracy
model.int8.onnx       weights and activations of 8 bits, of few products 32, if accurate enough: two to three times as
                      fast on a CPU
predictor.json        how prompts become token ids (predictor/encoding.py), or the folders of several networks
tokenizer.json        of the tokenizers library
training_lengths.json a sorted sample of the training answers' lengths
forecasts.json        forecasts for a sample of validation prompts: the first bin edges come from these forecasts
metrics.json          the predictor's accuracy, data and training
"""

import dataclasses
import json
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from tokenizers import Tokenizer
from torch import Tensor, nn

from predictor.dataset import Row
from predictor.encoding import Encoding
from predictor.errors import PredictorError
from predictor.evaluate import pinball_loss
from predictor.model import LengthModel
from predictor.network import CPU, ENCODING_FILE, INT8_FILE, MODEL_FILE, TOKENIZER_FILE, Matrix, Network
from predictor.predict import FORECASTS_FILE, LENGTHS_FILE, LengthPredictor
from predictor.prompt import Prompt

OPSET = 17
FEATURES_MAX = 256
"""Features of a prompt, at most. Of MiniLM's 384 they have nearly all that varies."""
FEATURES_PROMPTS = 1000  # prompts whose encodings give the directions of the features
TOLERANCE = 1e-3  # relative, between the network and the written model
FORECASTS_MAX = 300
INT8_LOSS_MAX = 0.01  # largest rise of the pinball loss with 8 bits, as a share of the loss of a constant
KEPT_SHARE_MAX = 1 / 6  # of the matrix products, the share that may keep 32 bits in the 8-bit model
WIDTH_PROMPTS = 64  # prompts that show how wide the products' inputs are


def export(
    model: LengthModel,
    tokenizer: Tokenizer,
    encoding: Encoding,
    training_lengths: Sequence[int],
    folder: Path,
    prompts: Sequence[Prompt],
) -> None:
    """Write all files that `LengthPredictor.load` needs, with 32 bits.

    prompts : a sample of what the predictor will read. It gives the features their directions.
    Raises PredictorError when the written model differs from the network.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INT8_FILE).unlink(missing_ok=True)  # from an earlier export
    tokenizer.save(str(folder / TOKENIZER_FILE))
    (folder / ENCODING_FILE).write_text(json.dumps(dataclasses.asdict(encoding), indent=1) + "\n")
    (folder / LENGTHS_FILE).write_text(json.dumps(list(training_lengths)) + "\n")
    model.eval()
    lines = encoding.encode(tokenizer, prompts[:FEATURES_PROMPTS])
    network = _Exported(model, *main_directions(_encoded(model, encoding, lines)))
    _write_onnx(network, folder / MODEL_FILE)
    _check(network, folder / MODEL_FILE)


def _encoded(model: LengthModel, encoding: Encoding, lines: Sequence[list[int]]) -> Matrix:
    """(prompts, hidden)"""
    padded = [map(torch.from_numpy, encoding.padded([line])) for line in lines]
    with torch.inference_mode():
        return np.concatenate([model.encoded(*line).numpy() for line in padded])


def main_directions(encoded: Matrix) -> tuple[Matrix, Matrix]:
    """The mean and the main directions of encodings (principal components; Pearson 1901), the widest first.

    encoded : (prompts, hidden), at least one prompt.  Returns (hidden,) and (hidden, features). The directions are
    scaled all alike, so that the features of these prompts have a mean square of 1.
    """
    mean = encoded.mean(axis=0)
    _, widths, directions = np.linalg.svd(encoded - mean, full_matrices=False)
    count = min(FEATURES_MAX, len(widths))
    scale = math.sqrt(np.square(widths[:count]).sum() / (len(encoded) * count)) or 1.0
    return mean, (directions[:count].T / scale).astype(np.float32)


def quantize_if_accurate(folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Add the 8-bit model, with which CPUs then serve, unless it predicts the validation rows clearly worse.

    A few matrix products cost most of the accuracy (`widest_products`). If 8 bits lose too much, these keep 32 bits:
    the widest one, the widest two, four and so on, up to a share of all products.

    Judged by the pinball loss, not by the share of right bins: on some hundred rows that share changes by a point when
    the rows are only put into other batches. Returns both losses in tokens, the bits for CPUs, and the number of
    products that keep 32 bits in the 8-bit model.
    """
    prompts, actual = [row.prompt for row in rows], np.array([row.output_tokens for row in rows], float)

    def loss(predictor: LengthPredictor) -> float:
        return pinball_loss(predictor.predict(prompts).astype(float), actual)

    predictor = LengthPredictor.load(folder, bits=32)
    full, constant = loss(predictor), pinball_loss(np.full((1, 1), np.median(predictor.training_lengths)), actual)
    products = widest_products(folder, predictor.networks[0], prompts[:WIDTH_PROMPTS])
    most = int(len(products) * KEPT_SHARE_MAX)
    for kept in (0, *(2**power for power in range(most.bit_length()))):  # 0, 1, 2, 4, ..., at most `most`
        quantize(folder, products[:kept])
        quantized = loss(LengthPredictor.load(folder, bits=8))
        bits = 8 if quantized <= full + INT8_LOSS_MAX * constant else 32
        if bits == 8:
            break
    if bits == 32:
        (folder / INT8_FILE).unlink()
    print(
        f"pinball loss on the validation rows: {full:.2f} tokens with 32 bits, {quantized:.2f} with 8 "
        f"({kept} of {len(products)} matrix products with 32); {bits} serve on CPUs",
        file=sys.stderr,
        flush=True,
    )
    return {
        "pinball_tokens_32_bits": round(full, 3),
        "pinball_tokens_8_bits": round(quantized, 3),
        "products_32_bits": kept,
        "cpu_bits": bits,
    }


def quantize(folder: Path, kept: Sequence[str] = ()) -> None:
    """Add the 8-bit model to the 32-bit model.  kept : matrix products that keep 32 bits."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the library advises a step that changes nothing here
    try:
        quantize_dynamic(
            folder / MODEL_FILE,
            folder / INT8_FILE,
            per_channel=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=list(kept),
        )
    finally:
        logging.disable(previous)


def widest_products(folder: Path, network: Network, prompts: Sequence[Prompt]) -> list[str]:
    """The matrix products with trained weights, by the width of their inputs, widest first.

    The width is the range of the inputs over their standard deviation, a mean over the prompts. All inputs of a product
    share 256 steps, so a few very large ones leave few steps to the others (Bondarenko et al., arXiv 2109.12948).
    """
    model = onnx.load(folder / MODEL_FILE)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {
        node.name: node.input[0] for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights
    }
    names = sorted(set(inputs.values()))
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[CPU])
    widths = np.zeros(len(names))
    for line in network.encoding.encode(network.tokenizer, prompts):
        input_ids, attention_mask = network.encoding.padded([line])
        values = session.run(names, {"input_ids": input_ids, "attention_mask": attention_mask})
        widths += [np.ptp(value) / (value.std() or 1.0) for value in values]
    width = dict(zip(names, widths, strict=True))
    return sorted(inputs, key=lambda product: -width[inputs[product]])


def with_forecasts(folder: Path, rows: Sequence[Row]) -> LengthPredictor:
    """The predictor of a folder, to which its forecasts for a sample of rows outside its training are added.

    They are bounded as in serving.
    """
    chosen = np.random.default_rng(0).permutation(len(rows))[:FORECASTS_MAX]
    sample = [rows[i] for i in sorted(chosen)]
    ceilings = np.array([np.inf if row.output_tokens_max is None else row.output_tokens_max for row in sample])
    lengths = np.minimum(LengthPredictor.load(folder).predict([row.prompt for row in sample]), ceilings[:, None])
    (folder / FORECASTS_FILE).write_text(json.dumps([[round(float(x), 1) for x in row] for row in lengths]) + "\n")
    return LengthPredictor.load(folder)


def check_export(model: LengthModel) -> None:
    """Raises PredictorError for an encoder that cannot be exported, or whose output depends on padding.

    To be called before a training, whose hours would otherwise be lost. Does not change the model.
    """
    twin = LengthModel(model.config)
    twin.load_state_dict(model.state_dict())
    nn.init.normal_(twin.head.weight, std=0.1)  # an untrained head has the same output for all prompts
    with tempfile.TemporaryDirectory() as folder:
        try:
            hidden = twin.head.in_features
            network = _Exported(twin, np.zeros(hidden, np.float32), np.eye(hidden, FEATURES_MAX, dtype=np.float32))
            _write_onnx(network, Path(folder) / MODEL_FILE)
            _check(network, Path(folder) / MODEL_FILE)
        except PredictorError:
            raise
        except Exception as error:  # the libraries raise many exceptions for an unknown encoder
            raise PredictorError(f"the encoder cannot be exported: {type(error).__name__}: {error}") from error


class _Exported(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """The network with plain outputs, as ONNX requires: the lengths, and the features of the prompts.

    mean, directions : of main_directions.
    """

    def __init__(self, model: LengthModel, mean: Matrix, directions: Matrix) -> None:
        super().__init__()
        self.model = model
        self.features = nn.Linear(*directions.shape)
        with torch.no_grad():
            self.features.weight.copy_(torch.from_numpy(directions.T))
            self.features.bias.copy_(torch.from_numpy(-mean @ directions))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.model.encoded(input_ids, attention_mask)
        return self.model.lengths_of(encoded), self.features(encoded)


def _write_onnx(network: _Exported, path: Path) -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    axes = {0: "prompts", 1: "tokens"}
    network.model.encoder.set_attn_implementation("eager")  # plain matrix products, which the quantization supports
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(),
            (ids, torch.ones_like(ids)),
            str(path),
            input_names=["input_ids", "attention_mask"],
            output_names=["lengths", "features"],
            dynamic_axes={
                "input_ids": axes,
                "attention_mask": axes,
                "lengths": {0: "prompts"},
                "features": {0: "prompts"},
            },
            opset_version=OPSET,
            dynamo=False,  # torch's new exporter writes shapes that the quantization refuses
        )


def _check(network: _Exported, path: Path) -> None:
    """Compare the written model with the network, for other shapes than the traced shape, and with padding."""
    ids = np.random.default_rng(0).integers(0, network.model.encoder.config.vocab_size, (3, 13))
    mask = np.ones_like(ids)
    mask[1, 5:] = 0
    session = onnxruntime.InferenceSession(path, providers=[CPU])
    written, written_features = session.run(None, {"input_ids": ids, "attention_mask": mask})
    with torch.inference_mode():
        expected, features = (output.numpy() for output in network(torch.tensor(ids), torch.tensor(mask)))
        alone, _ = network(torch.tensor(ids[1:2, :5]), torch.tensor(mask[1:2, :5]))
    close = np.allclose(written_features, features, rtol=0, atol=TOLERANCE * np.abs(features).max())
    if not (close and np.allclose(written, expected, rtol=TOLERANCE)):
        raise PredictorError("the exported model differs from the trained model; is its encoder a BERT?")
    if not np.allclose(expected[1:2], alone, rtol=TOLERANCE):
        raise PredictorError("the encoder's output for a prompt depends on the padding; is the encoder a BERT?")
