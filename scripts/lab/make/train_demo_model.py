"""Train the demo model from scratch on a CPU: a tiny Llama that counts, lists, spells and copies.

    python scripts/lab train_demo_model                              # corpus, tokenizer, model, evaluation, docs
    python scripts/lab train_demo_model --quick --output /tmp/demo   # the same steps in seconds; a useless model

scripts/lab/make/evaluate_demo_model.py measures a trained model and writes the lengths of its answers.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from kit import ROOT
from kit.arguments import parser_of
from kit.client import MODEL
from kit.progress import log, shared
from kit.servers import MODEL_FOLDER
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llmserve.demo.generation import LanguageModel
from make import demo_corpus
from make.demo_corpus import Example
from make.evaluate_demo_model import ANSWER_TOKENS_MAX, evaluate, table, write_docs

CONTEXT_TOKENS = 1024

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + (message['role'] if message['role'] in ['user', 'assistant'] else 'system') + '|>' }}"
    "{{ message['content'] | trim }}{{ '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers briefly.",
    "Answer the user.",
    "You are the llmserve demo model.",
    "Be kind and precise.",
    "Follow the user's instructions exactly.",
)


@dataclass(frozen=True)
class Plan:
    """Duration and parameters of the training. The run ends after `steps` or `minutes`, whichever comes first."""

    steps: int = 3000
    minutes: float = math.inf
    seed: int = 0
    tokens_per_part: int = 1024
    parts_per_step: int = 3  # a part has conversations of similar length; a step mixes lengths by summing parts
    learning_rate_max: float = 3e-3
    warmup: float = 0.03  # share of the run
    cooldown_from: float = 0.5  # share of the run
    evaluated_prompts: int = 1500
    evaluated_tokens_max: int = ANSWER_TOKENS_MAX


QUICK = Plan(steps=4, tokens_per_part=512, evaluated_prompts=8, evaluated_tokens_max=48)


# --- tokenizer --------------------------------------------------------------------------------------------


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE, for any UTF-8 text, with whole tokens for the corpus's numbers and words.

    A number is one token in any context, so that counting is a look-up of the successor. A single letter is one token,
    so that spelling is copying letters. `ignore_merges` keeps a piece of the vocabulary whole.
    """
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+ ?|\s+|."), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    phrasing = Tokenizer(models.BPE())
    phrasing.pre_tokenizer = pieces
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    phrasing.train_from_iterator(_phrasing_only(seed), trainer)

    bpe = json.loads(phrasing.to_str())["model"]
    vocab = {token: i for i, token in enumerate([PAD, SYSTEM, USER, ASSISTANT, END])}
    words = [prefix + word for word in demo_corpus.WORDS for prefix in ("", "Ġ")]  # Ġ is byte-level's space
    for token in [*map(str, range(demo_corpus.NUMBER_MAX + 1)), *bpe["vocab"], *words]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(pair) for pair in bpe["merges"]]
    whole = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    whole.pre_tokenizer, whole.decoder = pieces, decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _phrasing_only(seed: int) -> Iterator[str]:
    """Yield training text without numbers and listed words, which become whole tokens without merges."""
    whole_tokens = re.compile(r"\d+|\b(?:" + "|".join(demo_corpus.WORDS) + r")\b")
    yield from SYSTEM_PROMPTS * 20
    for example in demo_corpus.examples(4000, seed, held_out=False):
        yield whole_tokens.sub("0", f"{example.prompt}\n{example.answer}")  # "0" keeps the surrounding pieces unchanged


# --- training data ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversation:
    ids: list[int]
    weights: list[float]  # same length; positive where the model produces the token (answer and end token)


def conversations(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, examples: list[Example]
) -> list[Conversation]:
    """Encode examples as conversations: some after a system prompt, some after an earlier, irrelevant exchange."""
    encode = tokenizer.backend_tokenizer.encode_batch
    prompts = [e.ids for e in encode([example.prompt for example in examples], add_special_tokens=False)]
    answers = [e.ids for e in encode([example.answer for example in examples], add_special_tokens=False)]
    systems = [e.ids for e in encode(list(SYSTEM_PROMPTS), add_special_tokens=False)]
    system, user, assistant, end = tokenizer.convert_tokens_to_ids([SYSTEM, USER, ASSISTANT, END])
    encoded: list[Conversation] = []
    previous: Conversation | None = None
    for prompt, answer in zip(prompts, answers, strict=True):
        head = [system, *rng.choice(systems), end] if rng.random() < 0.1 else []
        question, reply = [user, *prompt, end, assistant], [*answer, end]
        # The weights are a compromise. With equal weights of tokens, the single decision to stop would drown in long
        # answers. With equal weights of answers, the model would hardly learn long answers.
        exchange = Conversation(question + reply, [0.0] * len(question) + [len(reply) ** -0.5] * len(reply))
        before = previous if previous and len(previous.ids) < 100 and rng.random() < 0.12 else Conversation([], [])
        encoded.append(
            Conversation(head + before.ids + exchange.ids, [0.0] * len(head) + before.weights + exchange.weights)
        )
        previous = exchange
    return encoded


def drills(tokenizer: PreTrainedTokenizerFast, rng: random.Random, n: int) -> list[Conversation]:
    """Return n conversations whose answers repeat the random tokens of their prompts.

    For every token of the answer the model must find a place in the prompt. So the model learns to look up tokens much
    sooner than from the corpus alone.
    """
    user, assistant, end = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, END])
    encoded = []
    for _ in range(n):
        ids = rng.sample(range(5, len(tokenizer)), rng.randint(2, 24))
        head, weight = [user, *ids, end, assistant], (len(ids) + 1) ** -0.5
        encoded.append(Conversation([*head, *ids, end], [0.0] * len(head) + [weight] * (len(ids) + 1)))
    return encoded


def parts(
    tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int, answer_tokens_max: int, drills_per_chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, weights) of shape (rows, width) without end; rows * width <= tokens unless a single row is longer.

    Rows of similar length share a part, which keeps padding small. The parts come in random order.
    """
    rng = random.Random(f"parts {seed}")
    source = demo_corpus.stream(seed, held_out=False, tokens_max=answer_tokens_max)
    while True:
        chunk = conversations(tokenizer, rng, [next(source) for _ in range(1024)])
        chunk += drills(tokenizer, rng, drills_per_chunk)
        chunk.sort(key=lambda c: len(c.ids))
        groups: list[list[Conversation]] = [[]]
        for conversation in chunk:
            if (len(groups[-1]) + 1) * len(conversation.ids) > tokens and groups[-1]:
                groups.append([])
            groups[-1].append(conversation)
        rng.shuffle(groups)
        yield from map(_padded, groups)


def _padded(group: list[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(c.ids) for c in group)
    ids = torch.tensor([c.ids + [0] * (width - len(c.ids)) for c in group])
    weights = torch.tensor([c.weights + [0.0] * (width - len(c.ids)) for c in group])
    return ids, weights


# --- training ---------------------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=640,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.set_attn_implementation("eager")  # the fused kernel's backward pass is slow on a CPU for short rows
    return model


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embedding and the norms, at one learning rate."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    embedding_and_norms = [p for name, p in model.named_parameters() if "layers" not in name or p.ndim < 2]
    return [
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(embedding_and_norms, lr=0.0, betas=(0.9, 0.98), weight_decay=0.05, fused=True),
    ]


def answer_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of cross-entropies over answers. Padding is on the right: the causal mask hides it."""
    weights = weights[:, 1:]
    answered = weights > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[answered])  # logits only of answer tokens
    losses = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][answered], reduction="none")
    return (losses * weights[answered]).sum()


@dataclass(frozen=True)
class Stage:
    """A stage of the training. Short answers and many drills come first.

    Short answers have the most decisions per token: where to start, which token to copy, when to stop. Drills teach the
    look-ups that these decisions need.
    """

    until: float  # progress, 0..1
    answer_tokens_max: int
    drills: int  # beside every 1024 examples


STAGES = (Stage(0.3, 40, 512), Stage(0.5, 40, 64), Stage(0.72, 120, 64), Stage(1.0, demo_corpus.TARGET_TOKENS_MAX, 32))


def learning_rate(plan: Plan, progress: float) -> float:
    """Return the rate at a progress in 0..1: a linear warm-up, a flat part, then a cosine to zero."""
    warm = min(1.0, (progress + 1e-3) / (plan.warmup + 1e-3))
    cooled = max(0.0, (progress - plan.cooldown_from) / (1 - plan.cooldown_from))
    return plan.learning_rate_max * warm * 0.5 * (1 + math.cos(math.pi * cooled))


@dataclass
class Run:
    """The part of a checkpoint besides the weights."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, checkpoint: Path, resume: bool
) -> Run:
    """Train until the end of the plan. Write a checkpoint every two minutes and at the end."""
    optimizers = build_optimizers(model)
    run = _load(checkpoint, model, optimizers) if resume else Run()
    began, saved = time.monotonic() - run.seconds, run.seconds
    reported, loss_mean = run.seconds - 60, float("nan")
    stage: Stage | None = None
    model.train()
    with shared() as report:
        while (progress := max(run.step / plan.steps, run.seconds / 60 / plan.minutes)) < 1:
            if stage is None or progress >= stage.until:  # a resumed run also draws new examples
                stage = next(stage for stage in STAGES if progress < stage.until)
                data = parts(
                    tokenizer, plan.seed + run.step, plan.tokens_per_part, stage.answer_tokens_max, stage.drills
                )
            loss = _step(
                model, optimizers, [next(data) for _ in range(plan.parts_per_step)], learning_rate(plan, progress), run
            )
            run.step, run.seconds = run.step + 1, time.monotonic() - began
            loss_mean = loss if math.isnan(loss_mean) else 0.95 * loss_mean + 0.05 * loss
            if run.seconds - reported > 15:
                reported = run.seconds
                report(_progress_line(run, loss_mean, progress), progress)
            if run.seconds - saved > 120:
                saved = run.seconds
                _save(checkpoint, model, optimizers, run)
    _save(checkpoint, model, optimizers, run)
    log(f"trained {run.step} steps, {run.tokens:,} tokens, {run.seconds / 60:.1f} min, loss {loss_mean:.4f}")
    return run


def _progress_line(run: Run, loss: float, progress: float) -> str:
    minutes_left = run.seconds / 60 * (1 / max(progress, 1e-3) - 1)
    speed = run.tokens / run.seconds
    return f"step {run.step}  loss {loss:.4f}  {speed:,.0f} tokens/s  {progress:.0%}  ETA {minutes_left:.1f} min"


def _step(
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    batch: list[tuple[torch.Tensor, torch.Tensor]],
    rate: float,
    run: Run,
) -> float:
    """Make one update from all parts. Returns the weighted mean loss per answer token."""
    weight = sum(float(weights.sum()) for _, weights in batch)
    total = 0.0
    for ids, weights in batch:
        loss = answer_loss(model, ids, weights) / weight
        loss.backward()
        total += loss.item()
        run.tokens += ids.numel()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return total


def _save(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")  # an interrupted write leaves the old checkpoint intact
    optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": optimizer_states, "run": asdict(run)}, partial)
    partial.replace(path)


def _load(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> Run:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Run(**state["run"])


# --- saving -------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model for transformers, with weights in float16, which rounds small numbers less than bfloat16.

    `model` itself is rounded, too, so that the evaluation measures the saved model.
    """
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=ANSWER_TOKENS_MAX,
    )
    model.to(torch.float16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    model.float()


# --- command line -------------------------------------------------------------------------------------------


def run_all(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Run all steps from the corpus to the documents. Returns the metrics."""
    torch.manual_seed(plan.seed)
    tokenizer = build_tokenizer(plan.seed)
    model = build_model(tokenizer)
    run = train(model, tokenizer, plan, args.checkpoint, args.resume)
    save(model, tokenizer, args.output)
    metrics = {
        "model": MODEL,
        "command": "python scripts/lab train_demo_model "
        f"--steps {plan.steps} --minutes {plan.minutes:g} --seed {plan.seed}",
        "date": time.strftime("%Y-%m"),
        "machine": args.machine,
        "seed": plan.seed,
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "weights_mb": round((args.output / "model.safetensors").stat().st_size / 1e6, 2),
        "training": {"steps": run.step, "tokens": run.tokens, "minutes": round(run.seconds / 60, 1)},
        **evaluate(
            LanguageModel(tokenizer, model.eval()), plan.evaluated_prompts, plan.seed, plan.evaluated_tokens_max
        ),
    }
    write_docs(metrics, args.docs)
    return metrics


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=math.inf, help="training time; the schedule adapts to it")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="training steps, unless the time ends first")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more threads need idle cores")
    parser.add_argument("--output", type=Path, default=MODEL_FOLDER, help="folder for the model")
    parser.add_argument("--docs", type=Path, help="folder for demo-model.{md,json} (docs/results; --quick: --output)")
    parser.add_argument("--checkpoint", type=Path, default=Path(gettempdir()) / "llmserve-demo-model.pt")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument("--machine", default="2 CPU cores", help="the kind of machine, for the documents")
    parser.add_argument("--quick", action="store_true", help="run all steps in seconds, for tests")
    args = parser.parse_args()
    if args.quick and args.output == MODEL_FOLDER:
        parser.error("--quick would overwrite the shipped model: use another --output")
    args.docs = args.docs or (args.output if args.quick else ROOT / "docs" / "results")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.quick:
        plan = replace(QUICK, seed=args.seed)
    else:
        plan = Plan(steps=args.steps, minutes=args.minutes, seed=args.seed)
    print(table(run_all(plan, args)))
