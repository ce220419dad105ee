"""Puts the recipes, DeepSpeed files and files for clusters into the wheel; everything else is in
pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {
    "recipes": Path("launch/recipes"),
    "ds_configs": Path("ds_configs"),
    "slurm": Path("launch/slurm"),
    "k8s": Path("launch/k8s"),
}


class BuildWithShippedFiles(build_py):
    """Copies them to palm_ds/shipped; palm_ds/cli/shipped.py finds them there."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout has them beside the package
            for source, target in self.shipped():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target, preserve_mode=False)

    def shipped(self) -> list[tuple[str, str]]:
        """Each file, and where the build has it."""
        build = Path(self.build_lib) / "palm_ds/shipped"
        return [
            (str(file), str(build / kind / file.relative_to(folder)))
            for kind, folder in SHIPPED.items()
            for suffix in ("yaml", "json", "sbatch")
            for file in sorted(folder.rglob(f"*.{suffix}"))
        ]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(source for source, _ in self.shipped())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = super().get_outputs(include_bytecode)
        return built if self.editable_mode else [*built, *(target for _, target in self.shipped())]


setup(cmdclass={"build_py": BuildWithShippedFiles})
