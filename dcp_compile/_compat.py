# SPDX-License-Identifier: Apache-2.0
"""Every private torch and transformers import, with the reason and the versions it was checked on."""
