"""aspire generate: prompts in, exact answers out, from a JSONL file to a JSONL file or for one prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aspire_jax.cli import progress, requests_file, sampling_options, setup
from aspire_jax.cli.journal import Journal, remembered
from aspire_jax.errors import InputError, written

if TYPE_CHECKING:
    from aspire_jax.host import Stream
    from aspire_jax.loading import Model
    from aspire_jax.request import Prepared
    from aspire_jax.results import Completion, Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--model", "-m", required=True, metavar="M", help="converted folder, or smollm2-135m")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", "-i", metavar="FILE", help='JSONL: {"id", "prompt"} or {"id", "messages"} a line')
    source.add_argument("--prompt", "-p", metavar="TEXT", help="one prompt; the answer is printed as it comes")
    parser.add_argument("--chat", action="store_true", help="--prompt is a user's message, not text to continue")
    parser.add_argument(
        "--output", "-o", type=written, metavar="FILE", help="JSONL with the answers, in the order of the input"
    )
    parser.add_argument(
        "--method", default="aspire", help="aspire (default), autoregressive, ...; the answers are equal"
    )
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE", help="an option of the method")
    parser.add_argument("--trace", metavar="FILE", help="what --method oracle replays: see aspire trace")
    what = "step costs: read where it exists, written at the end"
    parser.add_argument("--calibration", type=written, metavar="FILE", help=what)
    parser.add_argument("--max-tokens", type=setup.positive, default=128, metavar="N", help="default: 128")
    parser.add_argument("--slots", type=setup.positive, default=8, metavar="B", help="prompts at a time (default: 8)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    parser.add_argument("--max-length", type=setup.positive, metavar="S", help="prompt and answer, below the model's")
    parser.add_argument("--dtype", choices=setup.DTYPES, help="default: the model's")
    parser.add_argument("--truncate", action="store_true", help="cut the middle out of prompts that are too long")
    parser.add_argument(
        "--reproducible", action="store_true", help="logits equal to the last bit for all methods; slower"
    )
    setup.add_implementation(parser)
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--overwrite", action="store_true", help="replace the output, discard an interrupted run")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but the answer and errors")
    setup.add_json(parser, "the run's figures")
    sampling_options.add_all(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    _check(args)
    if args.input is not None:
        return _file(args)
    return _prompt(args)


def _check(args: argparse.Namespace) -> None:
    """Refuses combinations of options, before anything is imported or read."""
    if (args.method == "oracle") != (args.trace is not None):
        what = "missing, expected a file that aspire trace wrote" if args.trace is None else "expected --method oracle"
        raise InputError(f"--trace: {what}")
    if args.input is not None:
        if args.output is None:
            raise InputError("--output: missing, expected a file name beside --input")
        if args.chat:
            raise InputError("--chat: with --input, expected --prompt (lines of a file have messages)")
        if args.resume and args.overwrite:
            raise InputError("--resume: with --overwrite, expected one of them")
        _check_apart(args)
        return
    if args.n is not None and args.n > 1:
        raise InputError(f"--n: {args.n} with --prompt, expected --input")
    for name in ("output", "resume", "overwrite"):
        if getattr(args, name):
            raise InputError(f"--{name}: with --prompt, expected --input")


def _check_apart(args: argparse.Namespace) -> None:
    """No file that is written may be one that is read or written under another name."""
    named = {"the input": args.input, "--output": args.output, "--output's journal": f"{args.output}.partial"}
    if args.trace:
        named["--trace"] = args.trace
    if args.json and args.json != "-":
        named["--json"] = args.json
    if args.calibration:
        named["--calibration"] = args.calibration
    seen: dict[Path, str] = {}
    for name, file in named.items():
        other = seen.setdefault(Path(file).resolve(), name)
        if other != name:
            raise InputError(f"{name}: {file}, expected another file than {other}")


def _file(args: argparse.Namespace) -> int:
    from aspire_jax import request
    from aspire_jax.sampling.params import fresh_seed

    requests, places, digest = requests_file.read(args.input)
    options = setup.policy_options(args.method, args.policy)
    model = _load(args)
    chosen = args.seed is not None
    if not chosen:  # an interrupted run goes on with the seed it drew
        drawn = remembered(args.output, "seed") if args.resume else None
        args.seed = drawn if isinstance(drawn, int) else fresh_seed()
    prepared = request.prepare(model, requests, places=places, call="--", **_limits(args))
    if not chosen and all(r.sampling.greedy for r in prepared):
        args.seed = None
    settings = {"input": digest, "model": _identity(model), "method": args.method, "options": options, **_asked(args)}
    journal = Journal(args.output, [(r.id, r.choice) for r in prepared], settings)
    journal.check(resume=args.resume, overwrite=args.overwrite)
    if journal.complete:
        if args.json:
            setup.write_json(
                args.json, {**_about(args, model, options), "answers": len(prepared), "resumed": len(prepared)}
            )
        _say(args, f"{args.output}: complete (an answer to every id), nothing to do")
        return 0
    left = [r for r in prepared if (r.id, r.choice) not in journal.done]
    kept = len(prepared) - len(left)
    report = None
    stream = _stream(args, model, left, options) if left else None  # refuses before anything is written
    with journal:
        if stream is not None:
            try:
                with progress.Reporter(quiet=args.quiet) as stream.progress:
                    for chunk in stream:
                        if chunk.completion is not None:
                            journal.add(chunk.completion.as_dict())
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"{len(journal.done)} of {len(prepared)} answers are in {journal.partial}; --resume goes on"
                ) from None
            report = stream.report
            _calibrate(args, model, stream)
        journal.finish()
    figures: dict[str, Any] = {"answers": len(prepared), "resumed": kept}
    if args.json:
        setup.write_json(args.json, {**_about(args, model, options), **figures, **_figures(report)})
    resumed = f" ({kept} from the interrupted run)" if kept else ""
    seed = "" if all(r.sampling.greedy for r in prepared) else f", seed {args.seed}"
    _say(args, f"{args.output}: {len(prepared)} answers{resumed}{_summary(report)}{seed}")
    return 0


def _prompt(args: argparse.Namespace) -> int:
    from aspire_jax import request

    options = setup.policy_options(args.method, args.policy)
    model = _load(args)
    one = request.Request(messages=[{"role": "user", "content": args.prompt}]) if args.chat else args.prompt
    prepared = request.prepare(model, [one], places=["--prompt"], call="--", **_limits(args))
    stream = _stream(args, model, prepared, options)
    shown = args.json != "-"
    # On a terminal the text itself is the progress; a bar would be drawn into it.
    hidden = args.quiet or (shown and sys.stdout.isatty())
    completion: Completion | None = None
    with progress.Reporter(quiet=hidden) as stream.progress:
        for chunk in stream:
            if shown:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            completion = chunk.completion
    assert completion is not None
    _calibrate(args, model, stream)
    if shown:
        print()
    if args.json:
        answer = completion.as_dict()
        del answer["id"]
        setup.write_json(args.json, {**_about(args, model, options), "answer": answer, **_figures(stream.report)})
    if not args.quiet:
        seed = "" if completion.seed is None else f", seed {completion.seed}"
        print(f"{completion.finish_reason}{_summary(stream.report)}{seed}", file=sys.stderr)
    return 0


def _load(args: argparse.Namespace) -> Model:
    return setup.load_model(args.model, dtype=args.dtype, quiet=args.quiet)


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    limits = {name: getattr(args, name) for name in ("max_tokens", "stop", "truncate", "max_length")}
    return {**limits, "sampling": sampling_options.given(args)}


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, flat."""
    limits = _limits(args)
    sampling = limits.pop("sampling")
    how = {name: getattr(args, name) for name in ("acceptance", "reproducible", "implementation")}
    return {**limits, **sampling, **how}


def _stream(args: argparse.Namespace, model: Model, prepared: list[Prepared], options: dict[str, Any]) -> Stream:
    from aspire_jax import calibration, tracing
    from aspire_jax.host import Stream

    try:
        trace = None if args.trace is None else tracing.load(args.trace)
        engine, hooks = tracing.engine_and_hooks(
            model,
            prepared,
            method=args.method,
            slots=args.slots,
            options=options,
            trace=trace,
            implementation=args.implementation,
            reproducible=args.reproducible,
            acceptance=args.acceptance,
        )
    except InputError:
        raise
    except ValueError as error:
        raise setup.refused(error) from error
    known = args.calibration is not None and Path(args.calibration).exists()
    fit = calibration.read(args.calibration, model) if known else None
    return Stream(model, prepared, engine, fit=fit, hooks=hooks)


def _calibrate(args: argparse.Namespace, model: Model, stream: Stream) -> None:
    """Keeps what the run learned of the machine."""
    from aspire_jax import calibration

    if args.calibration is not None:
        setup.write_json(args.calibration, calibration.contents(stream.fit, model))


def _identity(model: Model) -> str:
    """The model as an interrupted run remembers it: its name may be another folder's by now."""
    import hashlib

    return f"{model.name} {model.dtype} {hashlib.sha256(model.config.to_json().encode()).hexdigest()[:12]}"


def _about(args: argparse.Namespace, model: Model, options: dict[str, Any]) -> dict[str, Any]:
    return {"model": model.name, "dtype": model.dtype, "method": args.method, "options": options, **_asked(args)}


def _figures(report: Report | None) -> dict[str, Any]:
    return {"report": None if report is None else report.as_dict()}


def _summary(report: Report | None) -> str:
    if report is None:
        return ""
    rates = f"decode {report.tokens_per_second:.1f} tokens/s, prefill {report.prefill_seconds:.1f} s"
    drafts = f", acceptance {report.acceptance:.0%}, mean accepted {report.mean_accepted_length:.1f}"
    return f", {report.completion_tokens:,} tokens, {rates}{drafts if report.drafted else ''}"


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.quiet and args.json != "-":
        print(text)
