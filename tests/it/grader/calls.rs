//! `calls`: results that JSON can only approximate.

use rstest::rstest;
use serde_json::json;
use wardian::grader::{GradeRequest, Grader as _, TestCase, Verdict};

use super::common::{graders, outcomes};

pub(super) fn calls(code: &str, cases: &[(&str, &str)], options: serde_json::Value) -> Verdict {
    let serde_json::Value::Object(options) = options else {
        panic!("options are an object")
    };
    graders().grade(&GradeRequest {
        grader: "calls".to_owned(),
        code: code.to_owned(),
        entry_points: vec!["f".to_owned()],
        cases: cases
            .iter()
            .map(|(input, output)| TestCase {
                input: (*input).to_owned(),
                output: (*output).to_owned(),
            })
            .collect(),
        options,
        ..GradeRequest::default()
    })
}

#[rstest]
#[case::tuple_for_list("def f(): return (1, (2,))", "[1, [2]]", true)]
#[case::integer_keys("def f(): return {1: 'a'}", r#"{"1": "a"}"#, true)]
#[case::close_float("def f(): return 0.1 + 0.2", "0.3", true)]
#[case::integer_for_float("def f(): return 2", "2.0", true)]
#[case::float_for_integer("def f(): return 2.0000001", "2", false)]
#[case::far_float("def f(): return 0.301", "0.3", false)]
#[case::bool_for_integer("def f(): return True", "1", false)]
#[case::text_for_number("def f(): return '2'", "2", false)]
#[case::none("def f(): return None", "null", true)]
#[case::big("def f(): return 10 ** 30", "1000000000000000000000000000000", true)]
#[case::longer("def f(): return [1, 2]", "[1]", false)]
#[case::set("def f(): return {1}", "[1]", false)]
#[case::always_equal(
    "class A:\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(): return A()",
    "1",
    false
)]
#[case::raises("def f(): raise ValueError", "1", false)]
fn results_are_compared(#[case] code: &str, #[case] expected: &str, #[case] holds: bool) {
    let verdict = calls(code, &[("[]", expected)], json!({}));
    assert_eq!(
        verdict.reward,
        Some(f64::from(u8::from(holds))),
        "{verdict:?}"
    );
}

#[test]
fn a_method_of_a_fresh_object_may_be_called() {
    let code = "class Solution:\n    def __init__(self): self.calls = 0\n    def add(self, a, b):\n        self.calls += 1\n        return a + b if self.calls == 1 else 0\n";
    let request = GradeRequest {
        grader: "calls".to_owned(),
        code: code.to_owned(),
        entry_points: vec!["Solution".to_owned()],
        cases: [("[1, 2]", "3"), ("[3, 4]", "[7]")]
            .map(|(input, output)| TestCase {
                input: input.to_owned(),
                output: output.to_owned(),
            })
            .into(),
        options: json!({"call": "Solution().add"})
            .as_object()
            .unwrap()
            .clone(),
        ..GradeRequest::default()
    };
    let verdict = graders().grade(&request);
    assert_eq!(outcomes(&verdict), [("test_1", true), ("test_2", false)]);
    assert_eq!(
        (
            verdict.tests[1].expected.as_deref(),
            verdict.tests[1].got.as_deref()
        ),
        (Some("[7]"), Some("7"))
    );
    // As APPS writes some results.
    let mut request = request;
    request.options.insert("unwrap".to_owned(), true.into());
    assert_eq!(graders().grade(&request).reward, Some(1.0));
}

#[test]
fn what_is_called_need_not_be_an_entry_point() {
    for (call, code) in [
        ("add", "def add(a, b): return a + b"),
        (
            "Sum().add",
            "class Sum:\n    def add(self, a, b): return a + b",
        ),
    ] {
        let request = GradeRequest {
            grader: "calls".to_owned(),
            code: code.to_owned(),
            cases: vec![TestCase {
                input: "[1, 2]".to_owned(),
                output: "3".to_owned(),
            }],
            options: json!({"call": call}).as_object().unwrap().clone(),
            ..GradeRequest::default()
        };
        let verdict = graders().grade(&request);
        assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    }
}
