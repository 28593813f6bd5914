"""Build hook: with FEDSPU_PREBUILT=1 a wheel brings the compiled library along."""

import os
import platform
import shutil
import sysconfig
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED = Path("src/fedspu/compiled")


class PrebuiltHook(BuildHookInterface[Any]):
    """Compiles the library for common processors of this kind of machine."""

    made: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put the library into the wheel."""
        if self.target_name != "wheel" or os.environ.get("FEDSPU_PREBUILT") != "1":
            return
        # The package itself is not installed here; this file of it needs nothing else.
        place = Path(self.root) / COMPILED / "library.py"
        spec = spec_from_file_location("library", place)
        assert spec is not None
        assert spec.loader is not None
        library = module_from_spec(spec)
        spec.loader.exec_module(library)
        processor = library.PREBUILT.get(platform.machine())
        compiler = library.find_compiler()
        if processor is None or compiler is None:
            raise RuntimeError(
                f"FEDSPU_PREBUILT=1: expected a C++ compiler and one of "
                f"{', '.join(library.PREBUILT)}; found {compiler} on "
                f"{platform.machine()}"
            )
        self.made = Path(tempfile.mkdtemp()) / library.prebuilt_path().name
        library.build(compiler, self.made, processor)
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"  # it knows nothing about Python
        for path in (self.made, self.made.with_suffix(".sha256")):
            place = COMPILED.relative_to("src") / "prebuilt" / path.name
            build_data["force_include"][str(path)] = str(place)

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        """Leave nothing behind."""
        if self.made is not None:
            shutil.rmtree(self.made.parent)
