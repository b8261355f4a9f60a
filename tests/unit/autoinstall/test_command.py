"""What `composer autoinstall` refuses before anything starts."""

import pytest

from composer.autoinstall.command import autoinstall_all
from composer.compose import compose
from composer.errors import ConfigError


@pytest.mark.parametrize("sandbox", [[], ["+env/sandbox=docker"]])
def test_limits_that_no_sandbox_can_keep(sandbox: list[str], tmp_path) -> None:
    words = ["env=coding", *sandbox, "autoinstall.repositories=[/nowhere]", f"autoinstall.output={tmp_path}/made"]
    with pytest.raises(ConfigError, match="at most half of autoinstall.limits.memory_bytes") as error:
        autoinstall_all(compose([*words, "autoinstall.limits.memory_bytes=1073741824"]))
    assert error.value.key == "autoinstall.limits.disk_bytes"
    assert not list(tmp_path.iterdir())
