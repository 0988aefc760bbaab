"""Pictures of shapes with captions by a grammar: any number of pairs, each made when it is asked for."""

from neuclip_lib.data.procedural.grammar import Scene, Things, describe, parse
from neuclip_lib.data.procedural.pairs import ProceduralPairs

__all__ = ["ProceduralPairs", "Scene", "Things", "describe", "parse"]
