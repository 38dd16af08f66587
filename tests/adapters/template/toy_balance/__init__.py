"""An adapter to copy. Importing it patches nothing; `toy_balance.install(max_tokens=…)` balances the toy host."""

from toy_balance.hooks import install, installation

__all__ = ["install", "installation"]
