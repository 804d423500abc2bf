"""Installs the packages `engine` and `training`: pip install -e . -c constraints.txt"""

from setuptools import find_packages, setup

setup(
    name="four-engine-rlhf",
    version="0.1.0",
    description="RLHF with PPO: actor, critic, reference and reward model as four DeepSpeed engines",
    packages=find_packages(include=["engine", "engine.*", "training", "training.*"]),
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.9",
        "deepspeed>=0.19.8,<0.20",
        "transformers>=5.17,<6",
        "datasets>=5.2,<6",
        "accelerate>=1.15,<2",
        "tensorboard>=2.20,<3",
        "pyarrow>=26,<27",
        "pyyaml>=6,<7",
        "jinja2>=3.1,<4",
        "matplotlib>=3.10,<4",
        "tqdm>=4.66,<5",
        "numpy>=2.0,<3",
        "psutil>=5.9,<8",
        "ninja>=1.11",
    ],
    extras_require={"test": ["pytest>=9.0,<10"]},
)
