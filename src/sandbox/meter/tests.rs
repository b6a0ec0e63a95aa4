use std::time::Duration;

use rstest::rstest;
use wasmtime::{Config, Engine, Error, Module, Store, Trap};

use super::super::budget::{Gauge, Stop};
use super::super::cancel::Cancel;
use super::super::host::Host;
use super::super::limits::Limits;
use super::super::runtime::{Interface, link};
use super::*;

/// Longer than any test here.
const HOUR: Duration = Duration::from_hours(1);

fn module(body: &str) -> Vec<u8> {
    let wat = format!(
        r#"(module
            (import "bridge" "take" (func $take (param i32 i32) (result i32)))
            (import "meter" "refill" (func $refill))
            (memory (export "memory") 4)
            (global $count (export "__stack_pointer") (mut i32) (i32.const 0))
            {body})"#
    );
    wat::parse_str(wat).unwrap()
}

/// A metered instance.
struct Metered {
    store: Store<Host>,
    instance: wasmtime::Instance,
    gauge: Gauge,
}

impl Metered {
    fn new(wasm: &[u8]) -> Self {
        let engine = Engine::new(&Config::new()).unwrap();
        let module = Module::new(&engine, meter(wasm).unwrap()).unwrap();
        let mut store = Store::new(&engine, Host::new(&Limits::default()));
        let linked = link(&engine, &module, Interface::Own).unwrap();
        let instance = linked.instantiate(&mut store).unwrap();
        let gauge = Gauge::find(&instance, &mut store).unwrap();
        Self {
            store,
            instance,
            gauge,
        }
    }

    /// Calls `run` and returns how it ended, what it left and what it counted.
    fn run(&mut self, fuel: u64, deadline: Duration) -> (Result<(), Error>, i64, i32) {
        self.store.data_mut().budget.start(deadline);
        self.gauge.start(&mut self.store, fuel).unwrap();
        let run = self
            .instance
            .get_typed_func::<(), ()>(&mut self.store, "run");
        let result = run.unwrap().call(&mut self.store, ());
        let count = self.instance.get_global(&mut self.store, "__stack_pointer");
        let count = count.unwrap().get(&mut self.store).unwrap_i32();
        (result, self.gauge.left(&mut self.store), count)
    }

    /// What `run` uses.
    fn cost(wasm: &[u8]) -> u64 {
        let (result, left, _) = Self::new(wasm).run(1 << 40, HOUR);
        result.unwrap();
        (1 << 40) - u64::try_from(left).unwrap()
    }
}

fn is_out_of_fuel(error: &Error) -> bool {
    error.downcast_ref() == Some(&Stop::OutOfFuel)
        || error.downcast_ref() == Some(&Trap::UnreachableCodeReached)
}

const COUNT: &str = "(global.set $count (i32.add (global.get $count) (i32.const 1)))";
const TREE: &str = r#"
    (func $tree (param i32) COUNT
        (if (local.get 0) (then
            (call $tree (i32.sub (local.get 0) (i32.const 1)))
            (call $tree (i32.sub (local.get 0) (i32.const 1))))))
    (func (export "run") (call $tree (i32.const 200)))"#;
const TREES: &str = r#"
    (func $even (param i32) COUNT (call $odd (local.get 0)))
    (func $odd (param i32)
        (if (local.get 0) (then
            (call $even (i32.sub (local.get 0) (i32.const 1)))
            (call $even (i32.sub (local.get 0) (i32.const 1))))))
    (func (export "run") (call $even (i32.const 200)))"#;
const INDIRECT_TREE: &str = r#"
    (type $one (func (param i32))) (type $other (func (param i32)))
    (table 1 funcref) (elem (i32.const 0) $tree)
    (func $tree (type $one) COUNT
        (if (local.get 0) (then
            (call_indirect (type $other) (i32.sub (local.get 0) (i32.const 1)) (i32.const 0))
            (call_indirect (type $other) (i32.sub (local.get 0) (i32.const 1)) (i32.const 0)))))
    (func (export "run") (call_indirect (type $one) (i32.const 200) (i32.const 0)))"#;
const TAIL_CALLS: &str = r#"(func $f (export "run") COUNT (return_call $f))"#;

/// Code that would run for ever, or longer than the universe.
#[rstest]
#[case::a_loop(r#"(func (export "run") (loop COUNT (br 0)))"#)]
#[case::a_conditional_loop(r#"(func (export "run") (loop COUNT (br_if 0 (i32.const 1))))"#)]
#[case::nested_loops(r#"(func (export "run") (loop (loop COUNT (loop (br 1))) (br 0)))"#)]
#[case::recursion(TREE)]
#[case::mutual_recursion(TREES)]
#[case::recursion_by_pointer(INDIRECT_TREE)]
#[case::tail_calls(TAIL_CALLS)]
#[case::calls_of_the_host(
    r#"(func (export "run") (loop COUNT (drop (call $take (i32.const 0) (i32.const 0))) (br 0)))"#
)]
#[case::growth(r#"(func (export "run") (loop COUNT (drop (memory.grow (i32.const 0))) (br 0)))"#)]
#[case::a_loop_with_a_mark(r#"(func (export "run") (loop COUNT (call $refill) (br 0)))"#)]
fn endless_code_ends_at_one_point_however_often_the_host_is_asked(#[case] body: &str) {
    let wasm = module(&body.replace("COUNT", COUNT));
    let ends = [1, 1000, 1 << 40].map(|slice| {
        let mut guest = Metered::new(&wasm);
        guest.store.data_mut().budget.slice = slice;
        let (result, left, count) = guest.run(1_000_000, HOUR);
        let error = result.unwrap_err();
        assert!(is_out_of_fuel(&error) && left < 0, "{error:?}, {left} left");
        (left, count)
    });
    assert_eq!(ends[0], ends[1]);
    assert_eq!(ends[0], ends[2]);
}

#[rstest]
#[case::recursion(TREE)]
#[case::mutual_recursion(TREES)]
#[case::a_loop_with_a_mark(r#"(func (export "run") (loop (call $refill) (br 0)))"#)]
#[case::a_loop_of_loops(
    r#"(func (export "run") (local i32)
        (loop (local.set 0 (i32.const 9))
            (loop (br_if 0 (local.tee 0 (i32.sub (local.get 0) (i32.const 1))))) (br 0)))"#
)]
fn the_deadline_and_a_cancellation_end_a_call(#[case] body: &str) {
    let wasm = module(&body.replace("COUNT", COUNT));
    let mut guest = Metered::new(&wasm);
    let (result, left, _) = guest.run(1 << 60, Duration::from_millis(5));
    assert_eq!(result.unwrap_err().downcast_ref(), Some(&Stop::Deadline));
    assert!(left > 0);

    let mut guest = Metered::new(&wasm);
    let cancel = Cancel::new();
    cancel.cancel();
    guest.store.data_mut().budget.heed(&cancel);
    let (result, left, _) = guest.run(1 << 60, HOUR);
    assert_eq!(result.unwrap_err().downcast_ref(), Some(&Stop::Cancelled));
    assert!(left > 0);
}

/// It would take minutes to use the fuel, and hours to meet the deadline.
#[rstest]
#[case::recursion_by_pointer(INDIRECT_TREE)]
#[case::a_loop(r#"(func (export "run") (loop (br 0)))"#)]
fn what_never_asks_runs_out_early(#[case] body: &str) {
    let wasm = module(&body.replace("COUNT", COUNT));
    let (result, left, _) = Metered::new(&wasm).run(1 << 60, HOUR);
    assert!(is_out_of_fuel(&result.unwrap_err()));
    assert!(left < 0);
}

#[test]
fn a_stopped_guest_can_be_called_again() {
    let wasm = module(
        r#"(func (export "run")
            (if (i32.eqz (global.get $count)) (then
                (global.set $count (i32.const 1)) (loop (call $refill) (br 0)))))"#,
    );
    let mut guest = Metered::new(&wasm);
    let (result, ..) = guest.run(10_000, HOUR);
    assert_eq!(result.unwrap_err().downcast_ref(), Some(&Stop::OutOfFuel));
    let (result, left, _) = guest.run(10_000, HOUR);
    result.unwrap();
    assert_eq!(left, 10_000);
}

#[test]
fn bulk_memory_is_charged_by_length() {
    let fill = |length: u32| {
        Metered::cost(&module(&format!(
            r#"(func (export "run")
                (memory.fill (i32.const 0) (i32.const 1) (i32.const {length})))"#
        )))
    };
    let copy = |length: u32| {
        Metered::cost(&module(&format!(
            r#"(func (export "run") (local i64 i32)
                (memory.copy (i32.const 0) (i32.const 8) (i32.const {length})))"#
        )))
    };
    assert_eq!(fill(80_000) - fill(0), 40_000);
    assert_eq!(copy(80_000) - copy(0), 40_000);
}

#[test]
fn an_iteration_pays_for_its_own_operators() {
    // In each loop: 4 operators of the counting down, and those inserted.
    let down = |local: u32, inner: &str, head: &str| {
        format!(
            "(local.set {local} (i32.const 100))
            (loop {head} {inner}
                (br_if 0 (local.tee {local} (i32.sub (local.get {local}) (i32.const 1)))))"
        )
    };
    let cost = |body: String| {
        Metered::cost(&module(&format!(
            r#"(func (export "run") (local i32 i32) {body})"#
        )))
    };
    assert_eq!(cost(down(0, "", "")), 100 * 5);
    // The inner loop's head and its start are in the outer one.
    let inner = down(1, "", "");
    assert_eq!(cost(down(0, &inner, "")), 100 * (5 + 2 + 100 * 5));
}

#[test]
fn an_iteration_pays_for_the_free_functions_it_calls() {
    let cost = |operators: usize| {
        let work = "(drop (i32.const 1))".repeat(operators);
        Metered::cost(&module(&format!(
            r#"(func $leaf {work})
            (func (export "run") (local i32) (local.set 0 (i32.const 100))
                (loop (call $leaf)
                    (br_if 0 (local.tee 0 (i32.sub (local.get 0) (i32.const 1))))))"#
        )))
    };
    assert_eq!(cost(1000) - cost(0), 100 * 1000);
}

#[test]
fn the_import_is_added_and_indices_follow() {
    let wasm = wat::parse_str(
        r#"(module
            (memory (export "memory") 1)
            (global (export "__stack_pointer") (mut i32) (i32.const 0))
            (type $get (func (result i32)))
            (table 1 funcref) (elem (i32.const 0) $seven)
            (func $six (result i32) (i32.const 6))
            (func $seven (result i32) (i32.const 7))
            (func (export "run")
                (global.set 0 (i32.add
                    (i32.mul (i32.const 10) (call $six))
                    (call_indirect (type $get) (i32.const 0))))))"#,
    );
    let (result, _, count) = Metered::new(&wasm.unwrap()).run(1000, HOUR);
    result.unwrap();
    assert_eq!(count, 67);
}

#[rstest]
#[case::exports_its_name(
    r#"(global (export "__meter") i64 (i64.const 0))"#,
    "exports `__meter`"
)]
#[case::another_global("(global (mut i64) (i64.const 0))", "mutable globals")]
#[case::calls_by_reference(
    "(type $unit (func)) (func (param (ref $unit)) (call_ref $unit (local.get 0)))",
    "CallRef"
)]
#[case::the_host_by_pointer("(table 1 funcref) (elem (i32.const 0) $take)", "imported function")]
#[case::a_tail_call_of_refill("(func (return_call $refill))", "not paid for")]
fn what_cannot_be_bounded_is_refused(#[case] part: &str, #[case] reason: &str) {
    let error = meter(&module(part)).expect_err(part).to_string();
    assert!(error.contains(reason), "{error}");
}

const CHARGE: &str = "(global.set $meter (i64.sub (global.get $meter) (i64.const 5)))
    (if (i64.lt_s (global.get $meter) (i64.const 0)) (then unreachable))";

/// The verifier alone, with code as the rewriter would write it and as it must not.
#[rstest]
#[case::a_charged_loop("(func (loop CHARGE (br 0)))", None)]
#[case::charged_recursion("(func $f CHARGE (call $f))", None)]
#[case::a_free_loop("(func (loop (br 0)))", Some("a loop does not pay"))]
#[case::a_late_charge(
    "(func (loop (br_if 0 (i32.const 1)) CHARGE))",
    Some("a loop does not pay")
)]
#[case::free_recursion("(func $f (call $f))", Some("circle"))]
#[case::free_recursion_by_pointer(
    "(table 1 funcref) (elem (i32.const 0) $f) (func $f (call_indirect (i32.const 0)))",
    Some("circle")
)]
#[case::a_free_host_call(
    "(func (drop (call $take (i32.const 0) (i32.const 0))))",
    Some("not paid for")
)]
#[case::free_growth("(func (drop (memory.grow (i32.const 1))))", Some("not paid for"))]
#[case::a_free_fill(
    "(func CHARGE (memory.fill (i32.const 0) (i32.const 0) (i32.const 9)))",
    Some("not paid for")
)]
#[case::a_refund("(func (global.set $meter (i64.const 99)))", Some("not paid for"))]
#[case::a_moved_mark("(func (global.set $mark (i64.const -1)))", Some("not paid for"))]
#[case::a_look("(func (drop (global.get $meter)))", Some("not paid for"))]
#[case::a_charge_that_pays(
    "(func (loop (global.set $meter (i64.sub (global.get $meter) (i64.const -5)))
        (if (i64.lt_s (global.get $meter) (i64.const 0)) (then unreachable)) (br 0)))",
    Some("not paid for")
)]
#[case::a_charge_without_a_check(
    "(func (loop (global.set $meter (i64.sub (global.get $meter) (i64.const 5))) (br 0)))",
    Some("not paid for")
)]
fn the_verifier_knows_what_is_missing(#[case] code: &str, #[case] reason: Option<&str>) {
    let code = code.replace("CHARGE", CHARGE);
    let wasm = module(&format!(
        r#"(global $meter (export "__meter") (mut i64) (i64.const 0))
        (global $mark (export "__meter_mark") (mut i64) (i64.const 0)) {code}"#
    ));
    match (verify::verify(&wasm), reason) {
        (Ok(()), None) => {}
        (Err(error), Some(reason)) => assert!(error.to_string().contains(reason), "{error}"),
        (result, _) => panic!("{result:?}"),
    }
}
