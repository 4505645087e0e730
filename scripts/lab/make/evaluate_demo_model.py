"""Evaluate the demo model: accuracy on held-out prompts, lengths for the length predictor, and the documents.

    python scripts/lab evaluate_demo_model                        # accuracy of the shipped model on held-out prompts
    python scripts/lab evaluate_demo_model --lengths-output lengths.jsonl    # data for the length predictor instead

All answers are greedy and batched. `output_tokens` counts the generated tokens of an answer without the end token, as
OpenAI's `usage.completion_tokens`.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

from kit.arguments import parser_of
from kit.client import MODEL
from kit.progress import log, shared
from kit.results import write_text
from kit.servers import MODEL_FOLDER

from llmserve.demo.generation import DecodingRow, Delta, LanguageModel
from llmserve.demo.protocol import ChatMessage
from make import demo_corpus
from make.demo_corpus import Example

ANSWER_TOKENS_MAX = 480  # a right answer has at most about 420


EVALUATION_SEED, LENGTHS_SEED = 1_000_003, 2_000_003  # added to the seed, so that draws differ from training


# --- evaluation -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    text: str
    output_tokens: int  # without the end token
    finish_reason: str  # "stop" (the model ended it) or "length"


def answers(
    model: LanguageModel,
    examples: list[Example],
    batch_size: int = 32,
    answer_tokens_max: int = ANSWER_TOKENS_MAX,
) -> list[Answer]:
    """Return the model's greedy answers, from the embedded engine's decoder, in the order of `examples`.

    A batch has answers of similar expected length, so that few steps run for answers that have ended.
    """
    order = sorted(range(len(examples)), key=lambda row: len(examples[row].answer))
    by_row: dict[int, Answer] = {}
    began = time.monotonic()
    with shared() as report:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            prompts = [model.chat_ids([ChatMessage("user", examples[row].prompt)]) for row in batch]
            batch_answers = _run(model, [model.row(ids, answer_tokens_max, model.defaults) for ids in prompts])
            by_row |= zip(batch, batch_answers, strict=True)
            tokens_per_s = sum(answer.output_tokens for answer in by_row.values()) / (time.monotonic() - began)
            report(f"answered {len(by_row)}/{len(order)}  {tokens_per_s:,.0f} tokens/s", len(by_row) / len(order))
    return [by_row[row] for row in range(len(examples))]


def _run(model: LanguageModel, rows: list[DecodingRow]) -> list[Answer]:
    texts = ["" for _ in rows]
    reasons = ["" for _ in rows]

    def emit(deltas: list[Delta | None]) -> None:
        for index, delta in enumerate(deltas):
            if delta is not None:
                texts[index] += delta.text
                reasons[index] = delta.finish_reason or ""

    model.run(rows, emit)
    return [Answer(text, row.output_tokens, reason) for text, row, reason in zip(texts, rows, reasons, strict=True)]


def evaluate(
    model: LanguageModel,
    prompts: int,
    seed: int,
    answer_tokens_max: int = ANSWER_TOKENS_MAX,
) -> dict[str, Any]:
    """Measure exact-match accuracy on held-out prompts, and the lengths of the right answers."""
    examples = demo_corpus.examples(prompts, seed + EVALUATION_SEED, held_out=True)
    began = time.monotonic()
    outputs = answers(model, examples, answer_tokens_max=answer_tokens_max)
    seconds = time.monotonic() - began
    right = [answer.text == example.answer for answer, example in zip(outputs, examples, strict=True)]
    prompts_of = Counter(example.family for example in examples)
    right_of = Counter(example.family for example, ok in zip(examples, right, strict=True) if ok)
    lengths = [len(model.text_ids(e.answer)) for e in examples]
    lengths_of = {f: [n for n, e in zip(lengths, examples, strict=True) if e.family == f] for f in prompts_of}
    return {
        "held_out_prompts": len(examples),
        "exact": round(mean(right), 4),
        "families": {
            family: {
                "prompts": prompts_of[family],
                "exact": round(right_of[family] / prompts_of[family], 4),
                "output_tokens": _spread(lengths_of[family]),
            }
            for family in sorted(prompts_of)
        },
        "output_tokens": _spread(lengths),
        "generated_tokens_per_s": round(sum(answer.output_tokens for answer in outputs) / seconds),
        "failures": _failures(examples, outputs, right),
        "samples": _samples(examples, outputs, lengths),
    }


def _spread(lengths: list[int]) -> dict[str, float]:
    ordered = sorted(lengths)
    return {
        "min": ordered[0],
        "median": median(ordered),
        "mean": round(mean(ordered), 1),
        "p95": ordered[int(0.95 * (len(ordered) - 1))],
        "max": ordered[-1],
        "coefficient_of_variation": round(pstdev(ordered) / mean(ordered), 2),
    }


def _failures(examples: list[Example], outputs: list[Answer], right: list[bool]) -> list[dict[str, str]]:
    wrong = [(e, a) for e, a, ok in zip(examples, outputs, right, strict=True) if not ok]
    return [{"prompt": e.prompt, "expected": e.answer[:200], "answered": a.text[:200]} for e, a in wrong[:12]]


def _samples(examples: list[Example], outputs: list[Answer], lengths: list[int]) -> list[dict[str, str]]:
    """Return one short prompt of each family with the model's answer, right or wrong."""
    by_family: dict[str, dict[str, str]] = {}
    for example, answer, length in zip(examples, outputs, lengths, strict=True):
        if 8 < length < 60:
            by_family.setdefault(example.family, {"prompt": example.prompt, "answered": answer.text})
    return [by_family[family] for family in sorted(by_family)]


# --- documents and lengths -------------------------------------------------------------------------------------


def write_docs(metrics: dict[str, Any], docs: Path) -> None:
    write_text(docs / "demo-model.json", json.dumps(metrics, indent=1, ensure_ascii=False))
    write_text(docs / "demo-model.md", _page(metrics).rstrip("\n"))


def _page(m: dict[str, Any]) -> str:
    samples = "\n\n".join(f"> {s['prompt']}\n\n```\n{s['answered']}\n```" for s in m["samples"])
    failures = "\n".join(f"* `{f['prompt']}` -> `{f['answered'][:80]!r}`" for f in m["failures"][:5])
    return f"""# The demo model

A Llama-architecture model of {m["parameters"] / 1e6:.1f} M parameters ({m["weights_mb"]:.1f} MB), trained from scratch
by `scripts/lab/make/train_demo_model.py` on synthetic text from `demo_corpus.py`. The model counts, recites lists and
tables, spells, copies and makes a little small talk. With it, `llmserve serve` answers on any CPU without a download.
Its answers have a wide spread of lengths, which the prompts reveal, so that llmserve can use predictions of length.

The model is not an assistant. It has no numbers above {demo_corpus.NUMBER_MAX}, spells only
{len(demo_corpus.SPELLABLE)} words, knows the times tables of 2 to 10, and was trained only on these families of
questions: to other questions it gives fluent but wrong answers. Answers are greedy by default. A number up to
{demo_corpus.NUMBER_MAX} is one token, and so is a letter.

## Training

    {m["command"]}

{m["date"]}, {m["machine"]} shared with other work, {m["training"]["minutes"]:.0f} minutes of training:
{m["training"]["steps"]} steps, {m["training"]["tokens"] / 1e6:.1f} M tokens. With a limit of time, the number of
steps depends on the machine, so that another run differs slightly.

## Exact answers on held-out prompts

The held-out prompts are a tenth of all prompts, chosen by hash, and are not in the training data; the same task may be
there in other words. Decoding is greedy. An answer is exact if every token is right.

{table(m)}

Lengths are those of the right answers, without the end token; their coefficient of variation is
{m["output_tokens"]["coefficient_of_variation"]}.

## Answers

{samples}

## Failures

{failures or "None among the held-out prompts."}
"""


def table(m: dict[str, Any]) -> str:
    """Return accuracy and lengths by family, as Markdown."""
    together = {"exact": m["exact"], "prompts": m["held_out_prompts"], "output_tokens": m["output_tokens"]}
    rows = [_row(family, values) for family, values in [*m["families"].items(), ("**all**", together)]]
    head = ["| family | prompts | exact | tokens, median | mean | p95 | max |", "|---|---|---|---|---|---|---|"]
    return "\n".join(head + rows)


def _row(family: str, v: dict[str, Any]) -> str:
    lengths = v["output_tokens"]
    return (
        f"| {family} | {v['prompts']} | {100 * v['exact']:.1f} % | {lengths['median']:.0f} | {lengths['mean']:.0f} "
        f"| {lengths['p95']} | {lengths['max']} |"
    )


def write_lengths(model: LanguageModel, path: Path, prompts: int, seed: int) -> None:
    """Write JSONL rows for the length predictor: prompts, and the number of tokens of the model's answers.

    All prompts are of the training split, so that neither model has seen the held-out prompts of benchmarks.
    """
    examples = demo_corpus.examples(prompts, seed + LENGTHS_SEED, held_out=False)
    outputs = answers(model, examples)
    with path.open("w") as file:
        for example, answer in zip(examples, outputs, strict=True):
            row = {
                "prompt": example.prompt,
                "model": MODEL,
                "output_tokens": answer.output_tokens,
                "finish_reason": answer.finish_reason,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log(f"{path}: {prompts} rows")


# --- command line -------------------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--prompts", type=int, help="number of prompts (1500 for accuracy, 12500 for lengths)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more threads need idle cores")
    parser.add_argument("--lengths-output", type=Path, help="write (prompt, model, output_tokens, finish_reason) rows")
    args = parser.parse_args()
    model = LanguageModel.load(str(args.model), threads=args.threads)
    if args.lengths_output:
        write_lengths(model, args.lengths_output, args.prompts or 12_500, args.seed)
    else:
        print(table(evaluate(model, args.prompts or 1500, args.seed)))
