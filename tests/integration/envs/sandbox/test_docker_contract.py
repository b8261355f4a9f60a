"""What bubblewrap's sandboxes promise, promised by Docker's: the same tests, with another backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from envs.sandbox.docker import DockerBackend
from tests.integration.envs.sandbox.test_commands import (  # noqa: F401
    sandbox,
    test_a_background_process_does_not_hold_a_command_up,
    test_a_cancelled_call_makes_the_sandbox_unusable_but_stoppable,
    test_a_command_may_close_its_streams,
    test_a_command_past_its_deadline_is_killed_with_its_children,
    test_a_program_cannot_forge_its_end,
    test_a_shell_that_ends_is_replaced,
    test_a_shell_that_is_to_begin_nowhere_begins_in_the_working_directory,
    test_an_endless_loop_ends_at_its_deadline,
    test_endless_output_is_cut_in_the_middle,
    test_exec_runs_programs_without_a_shell,
    test_exit_codes_and_streams_in_order,
    test_links_lead_nowhere_but_into_the_sandbox,
    test_output_and_files_are_binary_safe,
    test_programs_of_two_sandboxes_talk_through_a_channel,
    test_python_modules_start_as_in_a_new_interpreter,
    test_read_and_write_say_what_is_wrong,
    test_runs_of_pytest_share_nothing,
    test_start_puts_the_files_in_place,
    test_the_shell_begins_where_it_is_told_to,
    test_the_shell_keeps_its_state,
    test_where_the_shell_is_is_known_without_asking_it,
)
from tests.integration.envs.sandbox.test_limits import (  # noqa: F401
    test_a_limit_that_cannot_be_kept_stops_the_start,
    test_cpu_time_of_a_process,
    test_files_that_do_not_fit_stop_the_start,
    test_lifetime,
    test_size_of_a_file,
)

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def backend(run: Callable, docker_engine: str, docker_image: str) -> Iterator[DockerBackend]:
    backend = DockerBackend("contract", docker_image, host=docker_engine)
    yield backend
    run(backend.close())
