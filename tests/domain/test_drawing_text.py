"""The drawing in a terminal: rails that lead from each node to those that wait for it, within the width, in any alphabet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.drawing import picture
from everbeat.domain.drawing_text import SYMBOLS, draw
from everbeat.domain.workflow_info import NodeInfo, NodeState
from tests.domain.drawn_nodes import AT, CHILD, mapped, node


def lines_of(nodes: list[NodeInfo], *, width: int = 80, plain: bool = False, limit: int = 60) -> list[str]:
    drawn = draw(picture(nodes, at=AT, limit=limit), width=width, plain=plain)
    return ["".join(span.text for span in line).rstrip() for line in drawn]


ORDER = [
    node("reserve", state="COMPLETED"),
    node("charge", "reserve", state="RUNNING", attempt=2),
    node("pack", "reserve", state="ENQUEUED"),
    *mapped("measure", "reserve", states={"COMPLETED": 2, "FAILED": 1}),
    node("ship", "charge", "pack"),
    node("report", "ship", "measure", kind="workflow", task_id=CHILD),
]


def test_the_whole_picture() -> None:
    assert lines_of(ORDER) == [
        "✓ reserve  COMPLETED 12 s",
        "├─┬─╮",
        "● │ │ charge  RUNNING 12 s, attempt 2",
        "│ ◔ │ pack  ENQUEUED  waits for a worker",
        "├─╯ │",
        "│   ◔ measure[0..2]  2 COMPLETED, 1 FAILED",
        "○   │ ship  PENDING  waits for charge (RUNNING 12 s, attempt 2), pack (ENQUEUED)",
        "╰───┤",
        "    ○ report  PENDING",
        f"        workflow {CHILD}",
        "        waits for ship (PENDING), measure (ENQUEUED 12 s)",
    ]


def test_in_ascii_it_is_the_same_drawing() -> None:
    drawn = lines_of(ORDER, plain=True)
    assert all(line.isascii() for line in drawn)
    assert drawn[:4] == [
        "+ reserve  COMPLETED 12 s",
        "|-+-\\",
        "* | | charge  RUNNING 12 s, attempt 2",
        "| > | pack  ENQUEUED  waits for a worker",
    ]


def test_every_state_has_a_symbol_of_its_own_in_both_alphabets() -> None:
    assert set(SYMBOLS) == set(NodeState)
    assert len(set(SYMBOLS.values())) == len(NodeState)
    nodes = [node(state.value.lower(), state=state.value) for state in NodeState]
    first = {line[0] for line in lines_of(nodes, plain=True)}
    assert len(first) == len(NodeState)


def test_only_symbols_and_states_are_in_colour() -> None:
    (line, *_) = draw(picture(ORDER, at=AT), width=80)
    assert [(span.text, span.state) for span in line if span.state is not None] == [
        ("✓", NodeState.COMPLETED),
        ("COMPLETED 12 s", NodeState.COMPLETED),
    ]


def test_layer_by_layer_where_there_is_room_or_one_chain_after_the_other() -> None:
    chains = [
        node(f"{chain}{number}", *([f"{chain}{number - 1}"] if number else []), state="COMPLETED")
        for number in range(3)
        for chain in "abc"
    ]
    wide = [line.replace("│", "").split()[1] for line in lines_of(chains) if "✓" in line]
    assert wide == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    narrow = lines_of(chains, width=44)
    assert [line.split()[1] for line in narrow if "✓" in line] == [
        "a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"
    ]  # fmt: skip
    assert [line[0] for line in narrow[:6]] == ["✓", "│", "✓", "│", "✓", "✓"], "b0 has nothing to do with a2"


def test_where_rails_have_no_room_layers_are_numbered() -> None:
    fan = [node("a", state="COMPLETED"), *(node(f"b{n}", "a", task=f"t{n}") for n in range(30))]
    fan.append(node("c", *(f"b{n}" for n in range(30))))
    drawn = lines_of(fan)
    assert drawn[0] == "  1  ✓ a  COMPLETED 12 s"
    assert drawn[1] == "  2  ○ b0  PENDING"
    assert drawn[31].startswith("  3  ○ c  PENDING")
    assert "and 27 more" in " ".join(line.strip() for line in drawn[31:])


def test_it_says_how_much_is_not_drawn() -> None:
    chain = [node("n0"), *(node(f"n{number}", f"n{number - 1}") for number in range(1, 90))]
    assert lines_of(chain)[-1] == "… and 30 more nodes, which are not drawn"


@st.composite
def some_nodes(draw: st.DrawFn) -> list[NodeInfo]:
    """Up to 20 nodes, each of which waits for up to four earlier ones."""
    found: list[NodeInfo] = []
    for number in range(draw(st.integers(1, 20))):
        names = [each.name for each in found]
        needs = draw(st.sets(st.sampled_from(names), max_size=4)) if names else set()
        name = "n" * draw(st.integers(1, 12)) + str(number)
        found.append(node(name, *sorted(needs), state=draw(st.sampled_from(list(NodeState)))))
    return found


@given(some_nodes(), st.sampled_from([60, 80, 120]))
def test_every_node_has_its_line_and_none_is_too_wide(nodes: list[NodeInfo], width: int) -> None:
    drawn = lines_of(nodes, width=width)
    assert all(len(line) <= width for line in drawn)
    for each in nodes:
        assert sum(f" {each.name}  {each.state}" in line for line in drawn) == 1


@given(some_nodes())
def test_following_the_rails_finds_exactly_the_edges(nodes: list[NodeInfo]) -> None:
    done = [node(each.name, *each.needs, state="COMPLETED") for each in nodes[:12]]
    found = followed(lines_of(done, width=120))
    assert found == {(parent, each.name) for each in done for parent in each.needs}


def followed(drawn: list[str]) -> set[tuple[str, str]]:
    """The edges that a reader finds: who stands on a rail leads to whoever the rail ends in."""
    rails: dict[int, set[str]] = {}
    edges: set[tuple[str, str]] = set()
    own, name, above = 0, "", ""
    for line in drawn:
        if "✓" in line:
            own = line.index("✓")
            name = line[own:].replace("│", " ").split()[1]
            ends = rails.pop(own, set()) if above[own : own + 1] in ("│", *"├┤┼╭╮┬") else set()
            rails = {column: whose for column, whose in rails.items() if line[column : column + 1] == "│"}
            edges |= {(parent, name) for parent in ends}
            rails[own] = {name}
            above = line
            continue
        above = line
        standing = {column: set(whose) for column, whose in rails.items()}
        for column, joint in enumerate(line):
            if column != own and joint in "├┤┼╭╮┬":
                standing.setdefault(column, set()).add(name)
        if line[own] in "╰╯┴":
            standing.pop(own)
        rails = standing
    return edges
