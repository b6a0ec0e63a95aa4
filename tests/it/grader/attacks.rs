//! Attacks on each channel of the bridge. Every one shows that it reached its barrier.

use rstest::rstest;
use wardian::grader::{GradeLimits, GradeRequest, Grader as _, TestStatus, Verdict, VerdictStatus};
use wardian::sandbox::Limits;

use super::{grade, grader, grader_with, passed, request};

/// A submission that takes over its side of the bridge: `f(0)` makes every later reply the value
/// of `attack`, in which `E` encodes a value, with `Raw(x)` for what the format's writer takes as
/// `x`, and `B` is the writer's module.
fn forging(attack: &str) -> String {
    format!(
        "import sys
class Raw:
    def __init__(self, answer): self.answer = answer
def f(n):
    G = sys._getframe(1).f_globals
    B = G['_wardian_guest']
    E = lambda value, known=None: B.encode(value, lambda x: x.answer, known)[0]
    forged = {attack}
    G['answer'] = lambda request: forged
    return 'ready'
"
    )
}

fn failed_alone(verdict: &Verdict) -> &str {
    assert_eq!(verdict.status, VerdictStatus::Failed, "{verdict:?}");
    let mut failed = verdict
        .tests
        .iter()
        .filter(|test| test.status == TestStatus::Failed);
    let test = failed.next().expect("one test failed");
    assert_eq!(failed.next(), None, "{verdict:?}");
    &test.message
}

/// What cannot be a reply fails the test, even if it catches everything, and no other one.
#[rstest]
#[case::no_bytes("b''")]
#[case::garbage("b'\\xff' * 100")]
#[case::two_values("b'NN'")]
#[case::no_tuple("E(5)")]
#[case::short("E((0, None))")]
#[case::status_of_another_type("E((False, None, 1))")]
#[case::status_of_a_float("E((0.0, None, 1))")]
#[case::unknown_status("E((2, None, 1))")]
#[case::failure_without_exception("E((1, None, 'text', None))")]
#[case::success_with_a_line("E((0, None, 1, 1))")]
#[case::line_of_another_type(
    "E((1, None, Raw(('exception', (Raw(('named', 'ValueError')), (), None))), 'x'))"
)]
// References.
#[case::reference_to_nothing("b't\\x03i\\x01\\x00Nr\\x05'")]
#[case::reference_to_an_open_container("b't\\x03i\\x01\\x00Nr\\x00'")]
#[case::argument_that_was_not_sent("b't\\x03i\\x01\\x00Na\\x63'")]
#[case::argument_of_no_number("b't\\x03i\\x01\\x00Na\\xff\\xff\\xff\\xff\\x0f'")]
#[case::object_that_was_not_sent("E((0, None, Raw(99)))")]
#[case::more_than_could_be_written_out(
    "b't\\x03i\\x01\\x00Nt\\x20' + b'l\\x01b\\x80\\x80\\x40' + b'x' * (1 << 20) + b'r\\x02' * 31"
)]
#[case::deeper_than_could_be_written(
    "b't\\x03i\\x01\\x00Nt\\x02' + b'l\\x01' * 150 + b'N' + b'l\\x01' * 100 + b'r\\x02'"
)]
// Changes.
#[case::change_of_nothing("E((0, [(99, [])], 1))")]
#[case::change_before_the_first("E((0, [(-1, [])], 1))")]
#[case::change_of_a_tuple("E((0, [(0, ())], 1))")]
#[case::change_to_another_type("E((0, [(3, [])], 1))")]
#[case::changes_of_another_type("E((0, 5, 1))")]
#[case::change_without_content("E((0, [(0,)], 1))")]
#[case::change_that_makes_a_cycle("(lambda a, x: E((0, [(4, [x])], x), [0, 1, 2, 3, x]))(0, [])")]
#[case::change_that_multiplies(
    "(lambda x: E((0, [(4, [x] * 9)], [[x] * 1000] * 1000), [0, 1, 2, 3, x]))([])"
)]
// Values.
#[case::unknown_type("E((0, None, Raw(('bogus', 1))))")]
#[case::name_of_no_thing("E((0, None, Raw(('named', 'eval'))))")]
#[case::name_of_another_type("E((0, None, Raw(('named', 5))))")]
#[case::time_zone("E((0, None, Raw(('timezone', (5,)))))")]
#[case::factory("E((0, None, Raw(('defaultdict', ('eval', {})))))")]
#[case::fraction("E((0, None, Raw(('Fraction', (1, 0)))))")]
#[case::bool_for_int("E((0, None, Raw(('range', (True, 2, 1)))))")]
#[case::dict_for_counter("E((0, None, Raw(('Counter', ([],)))))")]
#[case::named_tuple_of_code("E((0, None, Raw(('namedtuple', ('P', ('x=print(1)',), (1,))))))")]
#[case::named_tuple_of_a_keyword("E((0, None, Raw(('namedtuple', ('P', ('class',), (1,))))))")]
#[case::named_tuple_with_private_fields(
    "E((0, None, Raw(('namedtuple', ('P', ('__class__',), (1,))))))"
)]
#[case::named_tuple_with_one_name_twice(
    "E((0, None, Raw(('namedtuple', ('P', ('x', 'x'), (1, 2))))))"
)]
#[case::named_tuple_of_another_length("E((0, None, Raw(('namedtuple', ('P', ('x',), (1, 2))))))")]
#[case::named_tuples_without_end(
    "E((0, None, [Raw(('namedtuple', ('P%d' % i, (), ()))) for i in range(300)]))"
)]
#[case::exception_of_no_class(
    "E((0, None, Raw(('exception', (Raw(('named', 'int')), (), None)))))"
)]
#[case::exception_with_a_private_attribute(
    "E((1, None, Raw(('exception', (Raw(('named', 'ValueError')), (), {'__class__': 1}))), None))"
)]
// Objects that stay with the submission.
#[case::unknown_kind("E((0, None, Raw((5, 'bogus'))))")]
#[case::kind_of_another_type("E((0, None, Raw((5, [1]))))")]
#[case::exception_of_a_class_that_is_none(
    "E((0, None, Raw((5, (Raw(('named', 'int')), 'E', '', (), None)))))"
)]
#[case::exception_with_text_of_another_type(
    "E((0, None, Raw((5, (Raw(('named', 'ValueError')), 'E', 5, (), None)))))"
)]
#[case::class_that_is_not_described("E((0, None, Raw((5, 6))))")]
fn forged_replies_fail_the_test(#[case] attack: &str) {
    let verdict = grade(
        &forging(attack),
        &[
            "assert f(0) == 'ready'\nx = []\ntry: f(x)\nexcept BaseException: pass",
            "assert f(0) == 'ready'",
        ],
    );
    assert_eq!(failed_alone(&verdict), "malformed reply", "{verdict:?}");
    assert_eq!(verdict.tests[0].status, TestStatus::Failed);
}

/// Replies that are nearly right, by the thousand: each is refused or is data, and the tests'
/// instance lives on.
#[test]
fn mutated_replies_are_survived() {
    let attack = "None
    import random
    rng = random.Random(n)
    named = lambda name: Raw(('named', name))
    values = [
        (0, None, [1, 2.5, 'text', b'x', None, True, {'a': (1, {2})}, 1 << 70, 1j]),
        (0, [(3, [1, 2])], Raw((5, 6))),
        (0, None, [Raw(('namedtuple', ('P', ('x', 'y'), (1, 2)))), Raw(('deque', ([1], 3)))]),
        (0, None, [Raw((9, 'generator')), Raw((8, 'function')), Raw((7, 'coroutine')), Raw(0)]),
        (1, None, Raw(('exception', (named('ValueError'), ('x',), {'a': 1}))), 3),
        (1, None, Raw((4, (Raw((3, 'class')), 'E', 'text', (1,), None))), None),
        (0, None, ('C', (named('ValueError'),), ['__eq__', '__len__'], ['m'], False, None)),
        (0, None, ('P', (), [], [], True, (('x', 'y'), (1,)))),
    ]
    seeds = [E(value) for value in values]
    def mutated():
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0: data[at:at + 1] = bytes([rng.choice(b'NTFifcsbBltdSzvhora\\0\\1\\2\\xff')])
                case 1: data[at:at] = bytes(rng.choice(b'NTFilthora\\0\\1') for _ in range(2))
                case 2: del data[at:at + rng.randint(1, 3)]
                case 3: data[at:at] = rng.choice(seeds)[at:at + 9]
        return bytes(data)
    G['answer'] = lambda request: mutated()
    return 'ready'";
    let test = "assert f(NUMBER) == 'ready'\nx = [1]\nfor i in range(1000):\n    \
                try: repr(f(x, [x]))\n    except BaseException: pass";
    let numbers = ["0", "1", "2"].map(|number| test.replace("NUMBER", number));
    let tests: Vec<&str> = numbers.iter().map(|test| &test[..]).collect();
    let verdict = grade(&forging(attack), &tests);
    for test in &verdict.tests {
        assert_eq!(test.message, "malformed reply", "{verdict:?}");
    }
}

/// The same takeover, with a proper reply: it is worth what the value is worth.
#[test]
fn a_forged_proper_reply_is_a_value() {
    let code = forging("E((0, None, [7]))");
    let tests = ["f(0)\nassert f(1) == [7]", "f(0)\nassert f(1) == [8]"];
    let verdict = grade(&code, &tests);
    assert_eq!(passed(&verdict), 1, "{verdict:?}");
    assert_eq!(verdict.tests[1].got.as_deref(), Some("[7]"));
}

/// Objects that would say what the test wants to hear are not asked.
#[rstest]
#[case::equal("__eq__ = lambda s, o: True", "f() == 3", "AssertionError")]
#[case::equal_from_the_right("__eq__ = lambda s, o: True", "3 == f()", "AssertionError")]
#[case::not_unequal("__ne__ = lambda s, o: False", "not f() != 3", "AssertionError")]
#[case::equal_inside(
    "__eq__ = lambda s, o: True",
    "[f()] == [3] or f() in [3] or {'a': f()} == {'a': 3}",
    "AssertionError"
)]
#[case::hash_and_equal(
    "__eq__ = lambda s, o: True\n    __hash__ = lambda s: hash(3)",
    "f() in {3}",
    "AssertionError"
)]
#[case::difference(
    "__sub__ = __rsub__ = lambda s, o: 0.0\n    __abs__ = lambda s: 0.0",
    "abs(f() - 3) < 1e-6",
    "unsupported operand"
)]
#[case::less(
    "__lt__ = __le__ = lambda s, o: True",
    "f() < 3",
    "not supported between"
)]
#[case::greater(
    "__lt__ = __le__ = lambda s, o: True",
    "3 > f()",
    "not supported between"
)]
#[case::contains("__contains__ = lambda s, o: True", "3 in f()", "not iterable")]
#[case::own_class("__class__ = int", "isinstance(f(), int)", "AssertionError")]
#[case::length("__len__ = lambda s: 10 ** 100", "len(f()) == 3", "OverflowError")]
#[case::truth("__bool__ = lambda s: 5", "f()", "TypeError")]
#[case::swallowed(
    "__enter__ = lambda s: s\n    __exit__ = lambda s, *a: True",
    "g()",
    "AssertionError"
)]
fn objects_do_not_decide(#[case] members: &str, #[case] test: &str, #[case] reason: &str) {
    let code = format!("class A:\n    {members}\ndef f(): return A()\n");
    let request = GradeRequest {
        setup: vec!["def g():\n    with f(): assert 1 == 2".to_owned()],
        tests: vec![
            format!("assert {test}"),
            // The object is there, and is what it is.
            "assert type(f()).__name__ == 'A' and f() is not None".to_owned(),
        ],
        ..request(&code, &[])
    };
    // `g` runs as a statement: its own assertion is what has to fail.
    let request = if test == "g()" {
        GradeRequest {
            tests: vec!["g()".to_owned()],
            ..request
        }
    } else {
        request
    };
    let verdict = grader().grade(&request);
    assert!(failed_alone(&verdict).contains(reason), "{verdict:?}");
}

/// Only what a test makes itself, by calling a class that the task names, takes part in operations
/// with the test's data; a class that stands in for a function makes nothing of the kind.
#[test]
fn classes_that_the_task_names_have_operators() {
    let class = "    def __init__(self, n=0): self.n = n\n    \
                 def __sub__(self, other): return self.n - other\n    \
                 def __abs__(self): return self.n\n    \
                 def __lt__(self, other): return True\n    \
                 def __contains__(self, other): return True\n";
    let named = |name: &str, test: &str| GradeRequest {
        entry_points: vec![name.to_owned()],
        tests: vec![test.to_owned()],
        ..request(&format!("class {name}:\n{class}"), &[])
    };
    let tests = [
        "assert NAME(2) - 3 == -1",
        "assert NAME(2) < 0",
        "assert 5 in NAME(2)",
    ];
    for test in tests {
        let request = named("Number", &test.replace("NAME", "Number"));
        assert_eq!(grader().grade(&request).reward, Some(1.0), "{test}");
        for name in ["number", "Find_Max", "N2"] {
            let verdict = grader().grade(&named(name, &test.replace("NAME", name)));
            let message = failed_alone(&verdict);
            assert!(
                message.starts_with("TypeError"),
                "{name}, {test}: {verdict:?}"
            );
        }
    }
}

/// An object that the submission gives for a result is asked nothing, be it one that the test made.
#[rstest]
#[case::another("Circle(2).area()", "return Circle(0)")]
#[case::itself("Circle(2).area()", "return self")]
#[case::itself_kept("(lambda c: (c.area(), c)[1])(Circle(2))", "return self")]
#[case::made_before("(lambda c, d: d.area())(Circle(2), Circle(3))", "return made[0]")]
#[case::made_again("(lambda x: (Circle(5), x)[1])(Circle(2).area())", "return again")]
#[case::made_for_it("[Circle(2).area(), Circle(5)][1]", "return again")]
#[case::in_a_list("Circle(2).area()[0]", "return [self]")]
#[case::of_an_attribute("Circle(2).x", "pass")]
#[case::of_an_operator("(Circle(2) - Circle(1))", "pass")]
#[case::of_its_negative("-Circle(2)", "pass")]
#[case::of_a_function("f()", "pass")]
#[case::of_its_iterator("next(iter(Circle(2)))", "pass")]
fn results_do_not_decide(#[case] result: &str, #[case] area: &str) {
    let code = format!(
        "made = []\nasked = False\nagain = None\nclass Circle:\n    \
         def __new__(cls, n):\n        global again\n        self = object.__new__(cls)\n        \
         if n == 2: again = self\n        \
         if n == 5: return again\n        made.append(self)\n        return self\n    \
         def area(self): {area}\n    x = property(lambda s: s)\n    \
         __sub__ = __rsub__ = lambda s, o: s if type(o) is Circle else says('0')\n    \
         __neg__ = lambda s: s\n    \
         __iter__ = lambda s: iter([s])\n    \
         __lt__ = __gt__ = __contains__ = lambda s, o: says(True)\n\
         def says(x):\n    global asked\n    asked = True\n    return x\n\
         def f(): return made[0] if made else Circle(0)\ndef was_asked(): return asked"
    );
    for test in ["RESULT < 10", "10 > RESULT", "RESULT - 10", "10 - RESULT"] {
        let test = test.replace("RESULT", result);
        let test = format!(
            "Circle(1)\ntry: {test}\nexcept TypeError as e: assert not was_asked(), e\nelse: assert False, 'decided'"
        );
        let test = format!("{test}\ntry: Circle(9) < 10\nfinally: assert was_asked()");
        let request = GradeRequest {
            entry_points: vec!["Circle".to_owned(), "f".to_owned(), "was_asked".to_owned()],
            tests: vec![test],
            ..request(&code, &[])
        };
        let verdict = grader().grade(&request);
        assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    }
}

/// A context manager of the submission's swallows what a block of the test raises, but no assertion
/// of it: one that fails, or one that cannot be evaluated.
#[rstest]
#[case::fails("assert 1 == 2", "AssertionError")]
#[case::raises("assert g() == 3", "ValueError: no")]
#[case::raises_here("assert [][f()] == 3", "TypeError")]
#[case::in_a_helper("check()", "ValueError: no")]
#[case::on_a_line_of_its_own("assert (\n        g()\n        == 3)", "ValueError: no")]
#[case::of_a_test_case("case.assertEqual(g(), 3)", "ValueError: no")]
fn a_context_manager_swallows_no_assertion(#[case] body: &str, #[case] message: &str) {
    let code = "class M:\n    def __enter__(self): pass\n    \
                def __exit__(self, *_): return True\n\
                def f(): return M()\ndef g(): raise ValueError('no')";
    let setup = "import unittest\ncase = unittest.TestCase()\ndef check():\n    assert g() == 3";
    let request = GradeRequest {
        setup: vec![setup.to_owned()],
        entry_points: vec!["f".to_owned(), "g".to_owned()],
        tests: vec![
            format!("with f():\n    {body}"),
            // Else it is the test's affair.
            "with f():\n    g()\nwith f():\n    1 / 0".to_owned(),
        ],
        ..request(code, &[])
    };
    let verdict = grader().grade(&request);
    assert!(failed_alone(&verdict).starts_with(message), "{verdict:?}");
    for grader in ["pytest", "script"] {
        let test = format!(
            "{setup}\ndef test_a():\n    with f():\n        {}\ntest_a()",
            body.replace('\n', "\n    ")
        );
        let request = GradeRequest {
            grader: grader.to_owned(),
            setup: Vec::new(),
            tests: vec![test],
            ..request.clone()
        };
        let verdict = super::common::graders().grade(&request);
        assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
        assert!(verdict.tests[0].message.starts_with(message), "{verdict:?}");
    }
}

/// A line that the submission does not have is none of a verdict's.
#[rstest]
#[case("1", Some(1))]
#[case("10", Some(10))]
#[case("11", None)]
#[case("0", None)]
#[case("-1", None)]
#[case("1 << 40", None)]
#[case("10 ** 5000", None)]
fn a_forged_line_is_not_shown(#[case] line: &str, #[case] shown: Option<u32>) {
    let code = forging(&format!(
        "E((1, None, Raw(('exception', (Raw(('named', 'ValueError')), ('no',), None))), {line}))"
    ));
    assert_eq!(code.lines().count(), 10);
    let list = grade(&code, &["f(0)\nf(1)"]);
    let program = super::common::judge("pytest", "def test_a():\n    f(0)\n    f(1)", &code);
    for verdict in [list, program] {
        let test = &verdict.tests[0];
        assert!(test.message.starts_with("ValueError: no"), "{verdict:?}");
        assert_eq!(test.line, shown, "{verdict:?}");
    }
}

/// What a submission can do with the bridge when it has taken over its own side.
#[rstest]
#[case::number_that_no_function_has(
    "G['_ask']('call', 5, (), {})",
    "ValueError: the tests have no object with this number"
)]
#[case::negative_number(
    "G['_ask']('call', -1, (), {})",
    "ValueError: the tests have no object with this number"
)]
#[case::number_of_another_type(
    "G['_ask']('call', True, (), {})",
    "ValueError: the tests have no object with this number"
)]
#[case::function_as_an_iterator("G['_ask']('next', 0)", "ValueError: no iterator has this number")]
#[case::arguments_of_another_type("G['_ask']('call', 0, [], {})", "ValueError: malformed request")]
#[case::keywords_of_another_type(
    "G['_ask']('call', 0, (), {1: 2})",
    "TypeError: keywords must be strings"
)]
#[case::verdict_of_its_own(
    "G['_ask']('grade', '', ['pass'], [], [])",
    "ValueError: malformed request"
)]
#[case::what_the_grader_asks("G['_ask']('get', 0, 'x')", "ValueError: malformed request")]
#[case::operation_of_another_type("G['_ask'](['call'], 0)", "ValueError: malformed request")]
#[case::nothing("G['_ask']()", "ValueError: not enough values")]
#[case::named_thing_as_function(
    "G['_ask']('call', len, ([],), {})",
    "ValueError: the tests have no object with this number"
)]
#[case::garbage("reply(b'\\xff\\xff')", "ValueError: malformed data")]
#[case::deep("reply(b'l\\x01' * 300 + b'N')", "ValueError: malformed data")]
#[case::object_of_the_grader("reply(b't\\x02s\\x04calla\\x00')", "ValueError: malformed data")]
#[case::foreign_object("reply(b't\\x02s\\x04callo\\x09')", "IndexError")]
#[case::round_of_its_own("str(B.bridge_open(b''))", "False")]
#[case::output_of_the_grader("str(B.bridge_printed(1))", "b''")]
#[case::endless_nesting(
    "cb(lambda again: G['_ask']('call', 0, (again,), {}))",
    "RecursionError: too many calls between the tests and the submission"
)]
fn a_callback_opens_nothing_else(#[case] attack: &str, #[case] barrier: &str) {
    let code = format!(
        "
def f(cb):
    G = type(cb).__call__.__globals__
    B = G['_wardian_guest']
    def reply(message):
        answer = B.bridge_call(message)
        return answer if type(answer) is int else raise_(G['_decode'](answer)[0][2])
    def raise_(error): raise error
    try:
        return {attack}
    except BaseException as error:
        return f'{{type(error).__name__}}: {{error}}'
"
    );
    let test = format!(
        "found = f(lambda g: g(g))\nassert {barrier:?} in found, found\n\
         assert f(lambda g: 1) is not None"
    );
    let verdict = grade(&code, &[&test]);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

/// A function of one test is of no use in another one, however it was kept.
#[test]
fn a_callback_is_of_one_test() {
    let code = "kept = None\n\
                def f(cb=None):\n    global kept\n    if cb is not None: kept = cb\n    \
                if kept is None: return 'nothing was kept'\n    return kept()";
    let verdict = grade(
        code,
        &[
            "assert f(lambda: 'called') == 'called'\nassert f() == 'called'",
            "assert f() == 'nothing was kept'",
        ],
    );
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

/// Nor does another test find the objects of the last one.
#[test]
fn objects_of_another_test_are_refused() {
    let request = GradeRequest {
        setup: vec!["kept = []".to_owned()],
        tests: vec![
            "kept.append(f())\nassert next(kept[0]) == 1".to_owned(),
            "try: next(kept[0])\nexcept Exception as e: assert 'another test' in str(e)\n\
             else: assert False"
                .to_owned(),
        ],
        ..request("def f():\n    while True: yield 1", &[])
    };
    let verdict = grader().grade(&request);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

/// Exceptions that would end a loop of the test's in silence, or get past it, are others here.
#[rstest]
#[case::end_of_a_loop(
    "raise StopIteration",
    "list(map(f, [1]))",
    "RemoteError: StopIteration"
)]
#[case::own_end(
    "class E(StopIteration): pass\n    raise E('x')",
    "list(map(f, [1]))",
    "RemoteError: E: x"
)]
#[case::exit("raise SystemExit(0)", "f(1)", "SystemExit: 0")]
#[case::interrupt("raise KeyboardInterrupt", "f(1)", "KeyboardInterrupt")]
#[case::text(
    "class E(Exception):\n        __str__ = lambda s: 1 / 0\n    raise E",
    "f(1)",
    "E"
)]
#[case::colours(
    "raise ValueError('\\x1b[31mred\\u202e')",
    "f(1)",
    r"ValueError: \x1b[31mred\u202e"
)]
#[case::what_it_is_not(
    "class E(Exception):\n        __class__ = AssertionError\n    raise E('x')",
    "f(1)",
    "E: x"
)]
fn exceptions_arrive_as_what_is_safe(#[case] body: &str, #[case] test: &str, #[case] text: &str) {
    let code = format!("def f(x):\n    {body}");
    let verdict = grade(&code, &[test, "assert True"]);
    assert!(failed_alone(&verdict).starts_with(text), "{verdict:?}");
}

/// Recursion through both sides meets Python's limit or the bridge's.
#[rstest]
#[case::through_the_bridge("return cb(f)", "f(lambda g: g(lambda h: h(g)))")]
#[case::endless_callback("return cb(0)", "f(lambda n: f(lambda m: n))")]
#[case::deep_below("return f(cb, n - 1) if n else cb(cb)", "f(lambda g: f(g, 800), 800)")]
#[case::deep_in_c("return eval('(' * 150 + 'cb(cb)' + ')' * 150)", "f(lambda g: f(g))")]
fn recursion_through_both_sides_ends(#[case] body: &str, #[case] call: &str) {
    let code = format!("def f(cb, n=0):\n    {body}");
    let tests = [
        &format!(
            "try: {call}\nexcept RecursionError as e: found = str(e)\nelse: found = 'ended'\nassert found"
        ),
        "assert True",
    ];
    let verdict = grade(&code, &tests.map(|test| test as &str));
    assert_eq!(verdict.tests[1].status, TestStatus::Passed, "{verdict:?}");
    assert!(
        matches!(
            verdict.status,
            VerdictStatus::Passed | VerdictStatus::Failed
        ),
        "{verdict:?}"
    );
}

/// A submission that ends while the test waits in a callback's callback.
#[rstest]
#[case("import os; os._exit(3)", "exited with code 3")]
#[case("import os; os.abort()", "trapped")]
#[case("while True: pass", "ran out of fuel")]
fn a_submission_that_ends_in_a_callback_fails_its_test(#[case] body: &str, #[case] end: &str) {
    let code = format!("def f(cb):\n    return cb()\ndef g():\n    {body}");
    let request = GradeRequest {
        entry_points: vec!["f".to_owned(), "g".to_owned()],
        tests: vec![
            "try: f(lambda: g())\nexcept BaseException: pass".to_owned(),
            "assert f(lambda: 1) == 1".to_owned(),
        ],
        ..request(&code, &[])
    };
    let verdict = grader().grade(&request);
    assert!(failed_alone(&verdict).contains(end), "{verdict:?}");
}

/// Three tests in which a limit was met are enough.
#[test]
fn the_cost_of_endless_loops_is_bounded() {
    let limits = GradeLimits {
        candidate: Limits {
            fuel: 100_000_000,
            ..GradeLimits::default().candidate
        },
        ..GradeLimits::default()
    };
    let code = "def f(x):\n    while x: pass\n    return x";
    let tests = ["assert f(0) == 0", "f(1)", "f(1)", "f(1)", "f(1)", "f(0)"];
    let verdict = grader_with(limits).grade(&request(code, &tests));
    assert_eq!(passed(&verdict), 1);
    for test in &verdict.tests[1..4] {
        let limit = test.limit.as_deref().expect("a limit was met");
        assert!(limit.contains("out of fuel"), "{verdict:?}");
    }
    for test in &verdict.tests[4..] {
        assert!(test.message.starts_with("not begun"), "{verdict:?}");
    }
    assert!(verdict.usage.candidate.fuel < 400_000_000, "{verdict:?}");
}

/// Each test has the fuel of a test: what others used is not missing.
#[test]
fn fuel_is_for_one_test() {
    let code = "def f(x):\n    for _ in range(100_000): pass\n    return x";
    let once = grade(code, &["assert f(1) == 1"]).usage.candidate.fuel;
    let limits = GradeLimits {
        candidate: Limits {
            fuel: once,
            ..GradeLimits::default().candidate
        },
        ..GradeLimits::default()
    };
    let grader = grader_with(limits);
    let verdict = grader.grade(&request(code, &["assert f(1) == 1"; 5]));
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    assert!(verdict.usage.candidate.fuel > 4 * (once / 2), "{verdict:?}");
    let verdict = grader.grade(&request(code, &["f(1), f(2), f(3)", "assert f(1) == 1"]));
    assert!(
        failed_alone(&verdict).contains("ran out of fuel"),
        "{verdict:?}"
    );
}

/// Data that wears out the tests' instance costs the test that met it, and no other one.
#[test]
fn a_test_that_ends_the_graders_instance_fails_alone() {
    let limits = GradeLimits {
        grader: Limits {
            fuel: 300_000_000,
            ..GradeLimits::default().grader
        },
        ..GradeLimits::default()
    };
    let code = "def f(x):\n    while x: yield 0";
    let good = "assert list(f(0)) == []";
    let worn = "sum(f(1))";
    let verdict = grader_with(limits.clone()).grade(&request(code, &[good, worn, good, good]));
    assert!(
        failed_alone(&verdict).contains("the grader's instance ran out of fuel"),
        "{verdict:?}"
    );
    assert!(verdict.tests[1].limit.is_some());
    // Not for ever.
    let tests = [worn, good, worn, worn, good];
    let verdict = grader_with(limits).grade(&request(code, &tests));
    assert_eq!(passed(&verdict), 1);
    assert!(
        verdict.tests[4].message.starts_with("not begun"),
        "{verdict:?}"
    );
}

fn switched_on(option: &str) -> serde_json::Map<String, serde_json::Value> {
    [(option.to_owned(), true.into())].into_iter().collect()
}

/// A submission changes what the expected value is computed from: in one interpreter that works.
#[test]
fn read_only_arguments_keep_the_expected_value() {
    let code = "def f(x):\n    x.clear()\n    return []";
    let open = request(code, &["x = [1, 2]\nassert f(x) == x[::-1]"]);
    assert_eq!(grader().grade(&open).reward, Some(1.0));
    let closed = GradeRequest {
        options: switched_on("read_only_arguments"),
        ..open
    };
    let verdict = grader().grade(&closed);
    assert_eq!(verdict.tests[0].expected.as_deref(), Some("[2, 1]"));
    assert_eq!(verdict.tests[0].got.as_deref(), Some("[]"));
}

/// Output is cut, and what it says decides nothing.
#[test]
fn output_is_bounded() {
    let request = GradeRequest {
        options: switched_on("printed_output"),
        ..request(
            "def f(): print('x' * 10 ** 6)",
            &["out = printed()\nf()\nassert len(out.text) == 65536"],
        )
    };
    let verdict = grader().grade(&request);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

/// Tests cannot hand out what would let a submission run code of its own among them.
#[rstest]
#[case("f(eval)")]
#[case("f(exec)")]
#[case("f(open)")]
#[case("f(__import__)")]
#[case("f(getattr)")]
#[case("f(object())")]
#[case("f(type('T', (), {})())")]
fn what_is_no_data_and_no_function_is_not_sent(#[case] test: &str) {
    let verdict = grade("def f(x): return 1", &[test, "assert f(1) == 1"]);
    assert!(
        failed_alone(&verdict).starts_with("cannot send a value of type"),
        "{verdict:?}"
    );
}

#[test]
fn cyclic_and_endless_values_are_not_sent() {
    let code = "def f(x=None):\n    y = []\n    y.append(y)\n    return y";
    let tests = ["x = []\nx.append(x)\nf(x)", "f()"];
    let verdict = grade(code, &tests);
    for test in &verdict.tests {
        assert!(
            test.message.contains("too deeply, or cyclic"),
            "{verdict:?}"
        );
    }
}

/// What a failed test says.
#[rstest]
#[case::comparison("assert f(3) == 4", "AssertionError", Some("4"), Some("3"), None)]
#[case::from_the_right("assert 4 == f(3)", "AssertionError", Some("4"), Some("3"), None)]
#[case::with_a_message(
    "assert f(3) == 4, 'no'",
    "AssertionError: no",
    Some("4"),
    Some("3"),
    None
)]
#[case::second_part(
    "assert f(1) == 1 and f(2) == 1",
    "AssertionError",
    Some("1"),
    Some("2"),
    None
)]
#[case::other_operator("assert f(3) > 4", "AssertionError", Some("> 4"), Some("3"), None)]
#[case::membership(
    "assert f(3) in (1, 2)",
    "AssertionError",
    Some("in (1, 2)"),
    Some("3"),
    None
)]
#[case::truth("assert f(0)", "AssertionError", Some("a true value"), Some("0"), None)]
#[case::falsehood(
    "assert not f(5)",
    "AssertionError",
    Some("a false value"),
    Some("5"),
    None
)]
#[case::text(
    "assert f('\\x1b[0m\\u202e') == ''",
    "AssertionError",
    Some("''"),
    Some(r"'\x1b[0m\u202e'"),
    None
)]
#[case::exception(
    "f(None)",
    "ZeroDivisionError: division by zero (solution.py, line 3)",
    None,
    None,
    Some(3)
)]
#[case::own_exception("1 / 0", "ZeroDivisionError: division by zero", None, None, None)]
fn failures_are_explained(
    #[case] test: &str,
    #[case] message: &str,
    #[case] expected: Option<&str>,
    #[case] got: Option<&str>,
    #[case] line: Option<u32>,
) {
    let verdict = grade(
        "def f(x):\n    if x is None:\n        1 / 0\n    return x",
        &[test],
    );
    let result = &verdict.tests[0];
    assert_eq!(result.message, message, "{verdict:?}");
    assert_eq!(result.expected.as_deref(), expected, "{verdict:?}");
    assert_eq!(result.got.as_deref(), got, "{verdict:?}");
    assert_eq!(result.line, line, "{verdict:?}");
    assert_eq!(result.limit, None);
}

/// A verdict does not depend on its explanation, for which there may be no fuel left.
#[test]
fn verdicts_stand_without_explanations() {
    let code = "def f(x): return x";
    // Compiled as it is, the rest costs little; to rewrite its asserts takes several times as much.
    let rest = format!("\nif f(0):\n{}", "    assert f(1) == 1\n".repeat(1000));
    let tests = |value| {
        vec![
            "assert f(1) == 1".to_owned(),
            format!("assert f(2) == {value}{rest}"),
        ]
    };
    let request = |value| GradeRequest {
        tests: tests(value),
        ..request(code, &[])
    };
    let used = grader().grade(&request(2)).usage.grader.fuel;
    let limits = GradeLimits {
        grader: Limits {
            fuel: used * 2,
            ..GradeLimits::default().grader
        },
        ..GradeLimits::default()
    };
    let verdict = grader_with(limits).grade(&request(3));
    assert_eq!(failed_alone(&verdict), "AssertionError");
    assert_eq!(verdict.tests[1].expected, None, "{verdict:?}");
    let verdict = grader().grade(&request(3));
    assert_eq!(failed_alone(&verdict), "AssertionError");
    assert_eq!(verdict.tests[1].expected.as_deref(), Some("3"));
}

/// What is explained is what failed: the test is run again with a submission that has seen nothing.
#[test]
fn explanations_show_what_failed() {
    let code = "n = 0\ndef f():\n    global n\n    n += 1\n    return n";
    let verdict = grade(
        code,
        &[
            "assert f() == 1",
            "assert f() == 1 and f() == 1",
            "assert f() == 2",
        ],
    );
    let shown: Vec<_> = verdict
        .tests
        .iter()
        .map(|test| (test.expected.as_deref(), test.got.as_deref()))
        .collect();
    let expected = [(None, None), (Some("1"), Some("2")), (Some("2"), Some("1"))];
    assert_eq!(shown, expected, "{verdict:?}");
}

#[test]
fn explanations_are_short() {
    let verdict = grade(
        "def f(): return [list(range(1000))] * 1000",
        &["assert f() == 'x' * 10 ** 6"],
    );
    let result = &verdict.tests[0];
    for text in [&result.expected, &result.got] {
        assert!(
            text.as_ref()
                .is_some_and(|text| text.chars().count() <= 200)
        );
    }
}
