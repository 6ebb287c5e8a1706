# SPDX-License-Identifier: Apache-2.0
"""The errors of dcp_compile. Each message names what was found, what was expected and what to do."""


class DCPCompileError(Exception):
    """Base class of every error raised by dcp_compile."""


class ConfigError(DCPCompileError, ValueError):
    """A setting is out of range or contradicts another one."""


class UnsupportedModelError(DCPCompileError, ValueError):
    """The model cannot be optimised as it is (not MLA, wrong device map, training mode, ...)."""


class CaptureError(DCPCompileError, RuntimeError):
    """The model could not be traced into one graph."""


class MatchError(DCPCompileError, RuntimeError):
    """A layer's attention could not be proven to be absorbable MLA; nothing was rewritten."""


class InvariantError(DCPCompileError, RuntimeError):
    """A pass left the graph in a state its contract forbids (a defect of dcp_compile)."""


class BackendError(DCPCompileError, ValueError):
    """No attention backend, or not the named one, can serve the request; the reasons are listed."""


class CapacityError(DCPCompileError, ValueError):
    """A request does not fit into the page pool, the state slots or the configured limits."""


class GenerationError(DCPCompileError, NotImplementedError):
    """generate() was asked for something the compiled decode path does not do."""


class CheckpointError(DCPCompileError, ValueError):
    """A checkpoint has unknown, missing or malformed tensors."""


class RankError(DCPCompileError, RuntimeError):
    """The ranks of a parallel group disagree, or one of them stopped answering."""
