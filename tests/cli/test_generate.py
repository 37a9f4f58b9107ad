"""`aspire generate`: files in and out, one prompt, figures as JSON, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

import aspire_jax
from aspire_jax.cli import setup
from tests.cli.files import SMALL, prompts, read_lines, write_lines


def test_a_file_of_prompts(aspire, folder, model, tmp_path):
    source = prompts(tmp_path / "in.jsonl")
    outputs = {}
    for method in ("aspire", "autoregressive"):
        options = (*SMALL, "--slots", 3) if method == "aspire" else (*SMALL[:4], "--slots", 3)
        file = tmp_path / f"{method}.jsonl"
        done = aspire("generate", "-m", folder, "-i", source, "-o", file, "--method", method, *options)
        assert done.code == 0, done.err
        assert re.fullmatch(rf"{file}: 7 answers, \d+ tokens, decode [\d.]+ tokens/s, prefill [\d.]+ s.*\n", done.out)
        assert "decode" in done.err and "7 of 7 done" in done.err
        outputs[method] = read_lines(file)
        assert not file.with_name(file.name + ".partial").exists()
    lines = outputs["aspire"]
    assert [line["id"] for line in lines] == [f"p{i}" for i in range(7)]
    expected = aspire_jax.generate(
        model, [line["prompt"] for line in read_lines(source)], max_tokens=40, slots=3, method="autoregressive"
    )
    for line, other, answer in zip(lines, outputs["autoregressive"], expected, strict=True):
        assert line["token_ids"] == other["token_ids"] == answer.token_ids
        assert (line["text"], line["finish_reason"]) == (other["text"], other["finish_reason"])
        assert line["text"] == answer.text
        assert line["usage"] == {"prompt_tokens": answer.prompt_tokens, "completion_tokens": len(answer.token_ids)}
        assert set(line["stats"]) == {"steps", "drafted", "accepted", "verifications", "mean_accepted_length"}


def test_reproducible(aspire, folder, tmp_path):
    source, file = prompts(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    given = ("generate", "-m", folder, "-i", source, "-o", file, *SMALL, "--quiet")
    done = aspire(*given, "--reproducible", "--json", tmp_path / "figures")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "figures").read_text())["reproducible"] is True


def test_fields_of_a_line(aspire, folder, tmp_path):
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": 1, "prompt": "ab" * 40, "max_tokens": 3, "ignore_eos": True},
        {"id": "1", "messages": [{"role": "user", "content": "hello"}], "stop": "zzz", "temperature": 0, "seed": 4},
        {"id": "t", "token_ids": [5, 6, 7], "max_tokens": 2, "stop_token_ids": [], "stop": None},
        {"id": "long", "prompt": "x" * 500, "truncate": True},
    )
    source.write_text("\ufeff\n" + source.read_text() + "\n \n")  # a byte order mark and blank lines do no harm
    done = aspire("generate", "-m", folder, "-i", source, "-o", tmp_path / "out", *SMALL, "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    lines = read_lines(tmp_path / "out")
    assert [line["id"] for line in lines] == [1, "1", "t", "long"]
    assert [len(line["token_ids"]) for line in lines][::2] == [3, 2]
    assert lines[3]["usage"]["prompt_tokens"] == 88


def test_one_prompt(aspire, folder, model):
    (answer,) = aspire_jax.generate(model, ["hello"], max_tokens=24, method="autoregressive")
    command = ("generate", "-m", folder, "--prompt", "hello", "--max-tokens", 24, "--method", "autoregressive")
    done = aspire(*command)
    assert done.code == 0 and done.out == answer.text + "\n"
    assert f"{answer.finish_reason}, {len(answer.token_ids)} tokens, decode" in done.err
    quiet = aspire(*command, "--quiet")
    assert (quiet.out, quiet.err) == (done.out, "")
    figures = json.loads(aspire(*command, "--json", "-").out)
    assert figures["answer"]["text"] == answer.text and figures["answer"]["token_ids"] == answer.token_ids
    assert figures["report"]["completion_tokens"] == len(answer.token_ids) and figures["method"] == "autoregressive"
    (chat,) = aspire_jax.generate(
        model, [[{"role": "user", "content": "hello"}]], max_tokens=24, method="autoregressive"
    )
    assert aspire(*command, "--chat", "-q").out == chat.text + "\n"


def test_figures_as_json(aspire, folder, tmp_path):
    source = prompts(tmp_path / "in.jsonl", 4)
    done = aspire("generate", "-m", folder, "-i", source, "-o", tmp_path / "out", *SMALL, "--json", "-")
    figures = json.loads(done.out)
    assert figures["answers"] == 4 and figures["resumed"] == 0 and figures["options"]["d_max"] == 3
    assert figures["report"]["finished"] == 4 and len(figures["report"]["cost"]) == 4
    done = aspire(
        "generate", "-m", folder, "-i", source, "-o", tmp_path / "out", "--overwrite", *SMALL, "--json", tmp_path / "j"
    )
    assert done.code == 0 and json.loads((tmp_path / "j").read_text())["answers"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --model/-m"),
        (("-m", "M"), "one of the arguments --input/-i --prompt/-p is required"),
        (("-m", "M", "-i", "I"), "--output: missing, expected a file name beside --input"),
        (("-m", "M", "-i", "I", "-p", "text"), "not allowed with argument"),
        (("-m", "M", "-i", "I", "-o", "I"), "--output: I, expected another file than the input"),
        (("-m", "M", "-i", "I", "-o", "O", "--json", "O"), "--json: O, expected another file than --output"),
        (("-m", "M", "-i", "I", "-o", "O", "--json", "I"), "--json: I, expected another file than the input"),
        (("-m", "M", "-i", "O.partial", "-o", "O"), "O.partial, expected another file than the input"),
        (("-m", "M", "-i", "I", "-o", "O", "--resume", "--overwrite"), "--resume: with --overwrite"),
        (("-m", "M", "-i", "I", "-o", "O", "--chat"), "--chat: with --input"),
        (("-m", "M", "-p", "text", "--n", "2"), "--n: 2 with --prompt, expected --input"),
        (("-m", "M", "-p", "text", "--temperature", "warm"), "--temperature: invalid float value: 'warm'"),
        (("-m", "M", "-p", "text", "--acceptance", "all"), "--acceptance: invalid choice: 'all'"),
        (("-m", "M", "-p", "text", "--resume"), "--resume: with --prompt, expected --input"),
        (("-m", "M", "-p", "text", "--max-tokens", "0"), "--max-tokens: '0', expected a whole number of at least 1"),
        (("-m", "M", "-p", "text", "--slots", "few"), "--slots: 'few', expected a whole number"),
        (("-m", "M", "-p", "text", "--method", "magic"), "--method: 'magic', expected one of autoregressive, "),
        (("-m", "M", "-p", "text", "--policy", "d_max"), "--policy: 'd_max', expected NAME=VALUE"),
        (
            ("-m", "M", "-p", "text", "--policy", "dmax=4"),
            "--policy dmax: method aspire has no such option, expected one of",
        ),
        (("-m", "M", "-p", "text", "--policy", "d_max=4.5"), "--policy d_max: '4.5', expected a whole number"),
        (("-m", "M", "-p", "text", "--policy", "rho=much"), "--policy rho: 'much', expected a number"),
        (("-m", "M", "-p", "text", "--policy", "in_step=1"), "--policy in_step: '1', expected true or false or none"),
        (
            ("-m", "M", "-p", "text", "--policy", "renew=never"),
            "--policy renew: 'never', expected step or verification",
        ),
        (("-m", "M", "-p", "text", "--policy", "w=1", "--policy", "w=1"), "--policy w: given twice"),
        (("-m", "M", "-p", "text"), "model: 'M', expected a converted folder or one of smollm2-135m"),
        (("-m", "M", "-i", "/nowhere/in", "-o", "O"), "/nowhere/in: No such file or directory, expected a JSONL file"),
    ],
)
def test_bad_arguments_are_one_line(aspire, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = aspire("generate", *arguments)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("aspire: error: ") and done.err.count("\n") == 1
    assert message in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("d_max=0", "--policy d_max: 0, expected 1 to 32"),
        ("rho=nan", "--policy rho: nan"),
        ("layers=9", "--policy layers: 9, expected 0 to 1"),
        ("layers=1,x", "--policy layers: '1,x', expected whole numbers with commas between them or none"),
    ],
)
def test_values_out_of_range_are_refused(aspire, folder, loaded, policy, message):
    done = aspire("generate", "-m", folder, "-p", "text", "--policy", policy)
    assert done.code == 2 and done.err.startswith(f"aspire: error: {message}") and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("pallas",), "--implementation: 'pallas' cannot serve this engine: the platform is cpu, expected a CUDA GPU"),
        (("pallas", "--reproducible"), "--implementation: 'pallas' cannot serve this engine: kernels merge new tokens"),
        (("triton",), "argument --implementation: invalid choice: 'triton'"),
    ],
)
def test_an_implementation_that_cannot_serve_is_refused(aspire, folder, loaded, tmp_path, given, message):
    source, out = prompts(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    done = aspire("generate", "-m", folder, "-i", source, "-o", out, "--quiet", "--implementation", *given)
    assert done.code == 2 and message in done.err.splitlines()[-1] and "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == [source]


def test_an_implementation_of_ones_choice(aspire, folder, loaded, tmp_path):
    command = ("generate", "-m", folder, "-p", "hello", "--max-tokens", 24, "--method", "autoregressive", "--json", "-")
    plain, chosen = (json.loads(aspire(*command, *more).out) for more in ((), ("--implementation", "xla")))
    assert (plain["implementation"], chosen["implementation"]) == (None, "xla")
    assert plain["answer"]["token_ids"] == chosen["answer"]["token_ids"]


def test_options_of_every_kind():
    given = ("renew=verification", "in_step=true", "rho=0.5", "layers=0,1", "mixed=False", "d_max=4", "regret_share=0")
    expected = {"renew": "verification", "in_step": True, "rho": 0.5, "layers": (0, 1), "mixed": False, "d_max": 4}
    assert setup.policy_options("aspire", given) == {**expected, "regret_share": 0.0}
    assert setup.policy_options("autoregressive", []) == {}


def test_sampling(aspire, folder, loaded, model, tmp_path):
    """Defaults on the command line, fields in a line; the seed that is reported gives the answer again."""
    command = ("generate", "-m", folder, "--method", "autoregressive", "--max-tokens", 24)
    done = aspire(*command, "-p", "hello", "--temperature", "0.9", "--top-p", "0.95")
    seed = int(done.err.rpartition("seed ")[2])
    (answer,) = aspire_jax.generate(
        model, ["hello"], max_tokens=24, method="autoregressive", temperature=0.9, top_p=0.95, seed=seed
    )
    assert done.out == answer.text + "\n" and answer.seed == seed
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "hello", "temperature": 0.9, "top_p": 0.95, "seed": seed},
        {"id": "b", "prompt": "hello", "logprobs": 2, "max_tokens": 3, "ignore_eos": True},
    )
    assert aspire(*command, "-i", source, "-o", tmp_path / "out", "--seed", "5").code == 0
    a, b = read_lines(tmp_path / "out")
    assert (a["token_ids"], a["seed"], a["choice"]) == (answer.token_ids, seed, 0) and "logprobs" not in a
    assert b["seed"] is None and [t["token_id"] for t in b["logprobs"]] == b["token_ids"]
    for token in b["logprobs"]:
        assert token["best"][0]["token_id"] == token["token_id"] and len(token["best"]) == 2
        assert token["best"][0]["logprob"] == token["logprob"] >= token["best"][1]["logprob"]
    done = aspire(*command, "-p", "hello", "--temperature", "0.001")
    assert done.code == 2 and done.err == (
        "aspire: error: --temperature: 0.001, expected a number, 0 (greedy) or 0.01 to 100\n"
    )


def test_help_and_version(aspire):
    assert "generate" in aspire("--help").out
    assert aspire("generate", "--help").code == 0
    assert aspire().code == 2
    assert re.match(r"\d+\.\d+|not installed", aspire("--version").out)


def test_a_calibration_is_kept_and_taken_up(aspire, folder, tmp_path):
    file = tmp_path / "costs.json"
    given = ("generate", "-m", folder, "-p", "abc" * 20, *SMALL, "--quiet", "--calibration", file)
    assert aspire(*given).code == 0
    first = json.loads(file.read_text())
    assert set(first) == {"model", "dtype", "device", "coefficients"} and len(first["coefficients"]) == 4
    assert min(first["coefficients"]) > 0
    assert aspire(*given).code == 0
    assert set(json.loads(file.read_text())) == set(first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coefficients": [1, 2, 3]}, r"coefficients: \[1, 2, 3\], expected 4 positive numbers"),
        ({"coefficients": [1, 2, 3, 0]}, r"coefficients: \[1, 2, 3, 0\], expected 4 positive numbers"),
        ({"coefficients": [1, 2, 3, float("inf")]}, "coefficients: .*, expected 4 positive numbers"),
        ({"model": "other"}, 'model: "other", expected "tiny"'),
        ({"dtype": "float16"}, 'dtype: "float16", expected "float32"'),
        (None, "expected a calibration"),
        ([], "a list, expected a JSON object"),
    ],
)
def test_a_calibration_that_does_not_serve_is_refused(aspire, folder, model, tmp_path, change, message):
    import jax

    file = tmp_path / "costs.json"
    good = {"model": model.name, "dtype": model.dtype, "device": jax.devices()[0].device_kind, "coefficients": [1] * 4}
    file.write_text("{" if change is None else json.dumps(good | change if isinstance(change, dict) else change))
    before = file.read_text()
    done = aspire("generate", "-m", folder, "-p", "abc", *SMALL, "--calibration", file)
    assert done.code == 2 and re.search(message, done.err), done.err
    assert done.err.count("\n") == 1 and str(file) in done.err
    assert file.read_text() == before
