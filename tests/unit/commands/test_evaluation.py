"""mmlu.py and summarize.py: what is asked, how answers are counted, and what is refused, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from launch.compat.evaluation.answers import Answer
from launch.compat.evaluation.mmlu import Mmlu, make_prompt
from launch.compat.evaluation.mmlu_questions import CATEGORIES, SUBJECTS, read_questions
from launch.compat.evaluation.script import Script, parse_arguments, run
from launch.compat.evaluation.summaries import TASKS, find_lines, read_lines
from launch.compat.evaluation.summaries import make_prompt as make_summary_prompt
from launch.compat.evaluation.summarize import Summarize
from launch.exit_codes import FailedError
from trtrun.configuration.model_paths import ASSETS
from trtrun.errors import ConfigError
from trtrun.tokens.text import Tokenizer, read_tokenizer

PROMPT = """\
The following are multiple choice questions (with answers) about  high school physics.

How many, 1?
A. 0.50
B. x, y
C. 
D. "q"
Answer: B

How many, 2?
A. 0.50
B. x, y
C. 
D. "q"
Answer:"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = read_tokenizer(ASSETS / "target")
    assert found is not None
    return found


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two subjects of one category and one of none."""
    for subject, letters in (("high_school_physics", "ABC"), ("virology", "A"), ("our_own", "DD")):
        for split in ("dev", "test"):
            (tmp_path / split).mkdir(exist_ok=True)
            lines = [f'"How many, {n}?",0.50,"x, y",,"""q""",{letter}\n' for n, letter in enumerate(letters)]
            (tmp_path / split / f"{subject}_{split}.csv").write_text("".join(lines), encoding="utf-8")
    return tmp_path


class SameAnswer:
    """Says the same to each prompt, and keeps these."""

    name, seconds = "TensorRT-LLM", 1.0

    def __init__(self, tokens: Sequence[int], perplexity: float | None = None) -> None:
        self.asked: list[Sequence[int]] = []
        self._answer = Answer(tuple(tokens), perplexity)

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, perplexity: bool = False) -> list[Answer]:
        self.asked += prompts
        return [self._answer] * len(prompts)


def test_a_prompt_is_the_originals_and_loses_its_last_shots(questions: Path, tokenizer: Tokenizer) -> None:
    subject = "high_school_physics"
    _, one, two = read_questions(questions, "test", subject)
    prompt = tokenizer.encode(PROMPT)
    assert make_prompt(tokenizer, subject, [one], two, 1024) == prompt
    assert make_prompt(tokenizer, subject, [one, two], two, len(prompt)) == prompt
    alone = make_prompt(tokenizer, subject, [one, two], two, 1)
    assert tokenizer.decode(alone) == PROMPT.replace(PROMPT[PROMPT.index("How") : PROMPT.rindex("How")], "")


def test_answers_are_counted_by_subject_category_and_in_all(
    questions: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--engine_dir", "x", "--test_trt_llm", "--data_dir", str(questions), "--check_accuracy"]
    answerer = SameAnswer(tokenizer.encode(" A."))
    _, missed = Mmlu().evaluate(parse_arguments(Mmlu(), words), answerer, tokenizer, 1024)
    assert capsys.readouterr().out.splitlines() == [
        "Average accuracy 0.333 - high_school_physics",
        "Average accuracy 0.000 - our_own",
        "Average accuracy 1.000 - virology",
        "Average accuracy 100.00 - health",
        "Average accuracy 33.33 - physics",
        "Average accuracy 33.33 - STEM",
        "Average accuracy 100.00 - other (business, health, misc.)",
        "MMLU weighted average accuracy: 33.33",
    ]
    assert missed == "" and len(answerer.asked) == 6
    arguments = parse_arguments(Mmlu(), [*words, "--accuracy_threshold", "34", "--max_ite", "1"])
    assert Mmlu().evaluate(arguments, answerer, tokenizer, 1024)[1] == "", "two of three are right now"
    capsys.readouterr()
    _, missed = Mmlu().evaluate(arguments, SameAnswer(tokenizer.encode(" D")), tokenizer, 40)
    assert "expected accuracy >= 34, and it is 0.00" in missed
    assert "3 questions are longer than 38 tokens, and count as wrong" in capsys.readouterr().out


def test_every_subject_has_its_category() -> None:
    assert sum(len(subjects.split()) for subjects in SUBJECTS.values()) == 57
    assert sorted(SUBJECTS) == sorted(name for names in CATEGORIES.values() for name in names)


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (Mmlu(), "--engine_dir x", "give --test_trt_llm, --test_hf or both"),
        (Mmlu(), "--engine_dir x --test_hf", "--test_hf needs --hf_model_dir"),
        (Mmlu(), "--test_trt_llm", "give --engine_dir or --hf_model_dir"),
        (Mmlu(), "--engine_dir x --test_trt_llm --top_k 3", "--top_k 3"),
        (Mmlu(), "--engine_dir x --test_trt_llm --num_beams 2", "beam search"),
        (Summarize(), "--engine_dir x --test_trt_llm --eval_tasks x", "did you mean '--eval_task'?"),
    ],
)
def test_what_is_not_supported_is_said(script: Script, words: str, message: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        parse_arguments(script, words.split())
    assert message in raised.value.format_message()


def test_a_wrong_configuration_is_said_with_the_scripts_name() -> None:
    words = "--engine_dir asset:target --test_trt_llm --data_type fp99"
    with pytest.raises(ConfigError, match=r"^mmlu\.py: target\.dtype: must be"):
        run(Mmlu(), words.split())


def test_data_that_is_missing_or_wrong_is_said(questions: Path, tmp_path: Path) -> None:
    (questions / "test" / "virology_test.csv").write_text("question,1,2,3,4\n", encoding="utf-8")
    arguments = parse_arguments(Mmlu(), ["--engine_dir", "x", "--test_trt_llm", "--data_dir", str(questions)])
    with pytest.raises(ConfigError, match=r"virology_test.csv: question 1: .* the letter that is right"):
        Mmlu().check(arguments, 1024)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"articel": "x", "highlights": "y"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lines.jsonl:1: no text 'article' .did you mean 'articel'"):
        read_lines(lines, TASKS["summarize"], 0)
    for text, said in ((b'{"article": ' + b"[" * 100_000, "nested too deeply"), (b"\xff", "byte 1 is not valid UTF-8")):
        (tmp_path / "odd.jsonl").write_bytes(text)
        with pytest.raises(ConfigError, match=rf"odd.jsonl: .*{said}"):
            read_lines(tmp_path / "odd.jsonl", TASKS["summarize"], 0)
    with pytest.raises(ConfigError, match=r"nowhere: No such file or directory$"):
        read_lines(tmp_path / "nowhere", TASKS["summarize"], 0)
    with pytest.raises(ConfigError, match="cnn_dailymail is not downloaded: save it as JSON lines"):
        find_lines(None, TASKS["summarize"])
    words = ["--engine_dir", "x", "--test_trt_llm", "--dataset_dir", str(lines)]
    with pytest.raises(ConfigError, match=r"923 and --output_len 200 are 1123 tokens, .* has 1024"):
        Summarize().check(parse_arguments(Summarize(), [*words, "--output_len", "200"]), 1024)
    lines.write_text('{"article": "x", "highlights": "y"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--output_dir .*lines.jsonl: cannot make this folder: File exists"):
        Summarize().check(parse_arguments(Summarize(), [*words, "--output_dir", str(lines)]), 1024)


def test_lines_come_in_the_order_of_the_library_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "ccdv" / "cnn_dailymail"
    folder.mkdir(parents=True)
    rows = [json.dumps({"article": str(n), "highlights": "y"}) + "\n" for n in range(8)]
    (folder / "test.jsonl").write_text("".join(rows), encoding="utf-8")
    task = TASKS["summarize"]
    found = read_lines(find_lines(str(tmp_path), task), task, 7)
    assert [text for text, _ in found] == [*"06724513"], "datasets.Dataset.shuffle(7), run once"


def test_a_long_text_keeps_its_end(tokenizer: Tokenizer) -> None:
    task = TASKS["summarize"]
    whole = make_summary_prompt(tokenizer, "It is n't so. " * 20, task, 1000, True)
    assert tokenizer.decode(whole).startswith("It isn't so.") and tokenizer.decode(whole).endswith("so.  TL;DR:")
    assert make_summary_prompt(tokenizer, "It is n't so. " * 20, task, 30, True) == whole[-30:]


def test_scores_below_their_thresholds_are_said(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"article": "an article", "highlights": "one two three four"}\n', encoding="utf-8")
    words = ["--engine_dir", "x", "--test_trt_llm", "--dataset_dir", str(lines), "--check_accuracy", "--eval_ppl"]
    arguments = parse_arguments(Summarize(), [*words, "--output_dir", str(tmp_path / "out")])
    text = "one two four five"
    answers, missed = Summarize().evaluate(arguments, SameAnswer(tokenizer.encode(text), 3.5), tokenizer, 1024)
    out = capsys.readouterr().out
    assert len(answers) == 1 and missed == ""
    assert "  rouge1: 75.0\n  rouge2: 33.33333333333333\n  rougeL: 75.0\n" in out
    assert "  Per-token perplexity: 3.5\n" in out
    assert (tmp_path / "out" / "trtllm.out").read_text(encoding="utf-8") == f"[0] [Beam 0] {text}\n"
    arguments.output_dir = str(lines)
    with pytest.raises(FailedError, match=r"cannot write .*trtllm\.out"):
        Summarize().evaluate(arguments, SameAnswer(tokenizer.encode(text), 3.5), tokenizer, 1024)
    arguments.output_dir = None
    _, missed = Summarize().evaluate(arguments, SameAnswer(tokenizer.encode("x"), 15.5), tokenizer, 1024)
    assert (
        missed
        == "rouge1 is 0.00, and more than 15 is asked for; the perplexity is 15.50, and less than 15 is asked for"
    )
