"""Everything that can happen to a scheduler on a small server: explored state by state, and checked at each.

| module | what it has |
|---|---|
| `contents` | what lies in every slot |
| `world` | a scheduler's state: what can happen in it, and when two are the same |
| `saving` | states as bytes |
| `explore` | breadth first through all of them |
| `rules`, `properties` | what must hold; a learner writes `properties` (phase 7) |
| `cases` | what is explored of each stage |
| `together` | several cases at once |
| `story` | a counterexample in words |
| `link` | a counterexample as text in a link |

Pure standard library.
"""
