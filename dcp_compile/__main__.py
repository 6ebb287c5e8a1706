# SPDX-License-Identifier: Apache-2.0
"""``python -m dcp_compile``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
