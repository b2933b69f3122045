"""MMLU's questions: files of four choices each (Hendrycks et al., arXiv:2009.03300), prompts of them, and subjects.

    DATA/dev/SUBJECT_dev.csv, DATA/test/SUBJECT_test.csv      question, A, B, C, D, letter

It knows texts and no model.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from trtrun.errors import ConfigError, shorten_path, why_unreadable

LETTERS = "ABCD"

SUBJECTS = {
    "biology": "college_biology high_school_biology",
    "business": "business_ethics management marketing",
    "chemistry": "college_chemistry high_school_chemistry",
    "computer science": "college_computer_science computer_security high_school_computer_science machine_learning",
    "culture": "human_sexuality sociology",
    "economics": "econometrics high_school_macroeconomics high_school_microeconomics",
    "engineering": "electrical_engineering",
    "geography": "high_school_geography",
    "health": "anatomy clinical_knowledge college_medicine human_aging medical_genetics nutrition "
    "professional_medicine virology",
    "history": "high_school_european_history high_school_us_history high_school_world_history prehistory",
    "law": "international_law jurisprudence professional_law",
    "math": "abstract_algebra college_mathematics elementary_mathematics high_school_mathematics "
    "high_school_statistics",
    "other": "global_facts miscellaneous professional_accounting",
    "philosophy": "formal_logic logical_fallacies moral_disputes moral_scenarios philosophy world_religions",
    "physics": "astronomy college_physics conceptual_physics high_school_physics",
    "politics": "high_school_government_and_politics public_relations security_studies us_foreign_policy",
    "psychology": "high_school_psychology professional_psychology",
}
"""By subcategory."""

CATEGORIES = {
    "STEM": ("physics", "chemistry", "biology", "computer science", "math", "engineering"),
    "humanities": ("history", "philosophy", "law"),
    "social sciences": ("politics", "culture", "economics", "geography", "psychology"),
    "other (business, health, misc.)": ("other", "business", "health"),
}

SUBCATEGORY_OF = {subject: name for name, subjects in SUBJECTS.items() for subject in subjects.split()}


@dataclass(frozen=True)
class Question:
    """One line of a file: the question with its choices, up to "Answer:", and the letter that is right."""

    text: str
    letter: str


def find_subjects(folder: Path) -> list[str]:
    """The subjects that a folder has, in the order of their names.

    Raises:
        ConfigError: there are none, or the dev file of one is missing.
    """
    subjects = sorted(file.name.removesuffix("_test.csv") for file in (folder / "test").glob("*_test.csv"))
    if not subjects:
        raise ConfigError(
            f"--data_dir {shorten_path(folder)}: no test/SUBJECT_test.csv there; nothing is downloaded: unpack "
            "MMLU's data.tar, and give the folder that has dev and test"
        )
    for subject in subjects:
        if not (folder / "dev" / f"{subject}_dev.csv").is_file():
            raise ConfigError(f"--data_dir {shorten_path(folder)}: dev/{subject}_dev.csv is missing")
    return subjects


def read_questions(folder: Path, split: str, subject: str) -> list[Question]:
    """The questions of one subject, "dev" or "test". Texts are as the file has them.

    Raises:
        ConfigError: the file cannot be read, or a line is no question.
    """
    path = folder / split / f"{subject}_{split}.csv"
    questions: list[Question] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                if not row:
                    continue
                if not 4 <= len(row) <= len(LETTERS) + 2 or row[-1] not in LETTERS or not row[-1]:
                    raise ConfigError(
                        f"{path}: question {len(questions) + 1}: a line has a question, two to four choices and the "
                        "letter that is right"
                    )
                choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row[1:-1], strict=False))
                questions.append(Question(f"{row[0]}{choices}\nAnswer:", row[-1]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {why_unreadable(error)}") from None
    if split == "test" and not questions:
        raise ConfigError(f"{path}: no question")
    return questions


def write_prompt(subject: str, shots: list[Question], question: Question) -> str:
    """The prompt of a question, behind some with their answers; the two blanks in front of the subject are the
    original's."""
    told = f"The following are multiple choice questions (with answers) about  {subject.replace('_', ' ')}.\n\n"
    return told + "".join(f"{shot.text} {shot.letter}\n\n" for shot in shots) + question.text
