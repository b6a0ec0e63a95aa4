//! What a control goes through, and what its own breakdowns say.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// The first step is done, and the second is not come to.
const HALF: (bool, Option<f64>, Option<EpisodeStatus>) =
    (true, Some(0.5), Some(EpisodeStatus::Failed));

/// How a reference may break down that works on a machine with a network, or with more memory.
#[test]
fn a_reference_that_breaks_down_says_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &[&PLAIN[..], &[SOLUTION]].concat());
    let killed = || Ending::Killed {
        reason: "by itself".to_owned(),
    };
    let full = || Ending::OutOfMemory { limit: 1, used: 2 };
    type Breaks = (&'static str, fn() -> Ending);
    let cases: [Breaks; 6] = [
        ("put /solution", killed),
        ("put /solution", late),
        ("put /solution", || FAILED),
        ("solve.sh", full),
        ("solve.sh", late),
        ("solve.sh", killed),
    ];
    for (at, ending) in cases {
        // What decides is whether the verifier leaves a reward where nothing was done.
        for (untouched, expected) in [(true, FAILED_WITH_0), (false, OURS)] {
            let backend = Scripted::new(move |inside, line, command| {
                if line.contains(at) {
                    inside.write("/broken", "");
                    return Err(ending());
                }
                let is_control = inside.number > 0;
                if is_verifier(command) && is_control && untouched {
                    assert!(!inside.has("/broken"), "it is another actor");
                    inside.write(REWARD, "1");
                }
                Ok(String::new())
            });
            let place = place(&backend);
            let result = submit(&mut environment(&place, &task));
            assert_eq!(end(&result), expected, "{at} {:?}: {result:?}", ending());
            // The policy's, the reference's, and one that nobody touched; none is kept ready for the second.
            assert_eq!(
                (backend.started(), backend.rare(), backend.live()),
                (3, 1, 0)
            );
        }
    }
}

/// A reference that was late may work at another time, and so may its verifier.
#[test]
fn what_was_late_on_the_way_of_a_control_is_not_held_against_the_task() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &[&PLAIN[..], &[SOLUTION]].concat());
    let is_busy = Arc::new(AtomicBool::new(true));
    let busy = Arc::clone(&is_busy);
    let backend = Scripted::new(move |inside, line, command| {
        if line.contains("solve.sh") {
            if busy.load(Ordering::SeqCst) {
                return Err(late());
            }
            inside.write("/solved", "");
        }
        // The policy's actor is not solved, and the verifier leaves a reward for what is.
        if is_verifier(command) && inside.has("/solved") {
            inside.write(REWARD, "1");
        }
        Ok(String::new())
    });
    let place = place(&backend);
    for _ in 0..5 {
        let result = submit(&mut environment(&place, &task));
        assert_eq!(end(&result), OURS, "{result:?}");
    }
    is_busy.store(false, Ordering::SeqCst);
    // A control of no time is asked for again at once, or nearly.
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while end(&submit(&mut environment(&place, &task))) != FAILED_WITH_0 {
        assert!(std::time::Instant::now() < until, "it was given up");
    }
}

/// A later part may rest on what the verifiers, folders and checks of the earlier ones leave.
#[test]
fn a_control_that_nobody_touched_goes_through_the_parts_before() {
    let folder = tempfile::tempdir().unwrap();
    let steps = |name: &str| format!("[[steps]]\nname = \"{name}\"\n");
    let check = "[steps.healthcheck]\ncommand = \"healthy\"\nretries = 1\n";
    let config = [
        "[environment]\ndocker_image = \"a\"\n",
        &steps("one"),
        &steps("two"),
        check,
        &steps("three"),
        check,
    ];
    let config = config.concat();
    let task = task(
        folder.path(),
        &[
            ("task.toml", &config),
            ("steps/one/instruction.md", "First."),
            ("steps/one/tests/test.sh", "judge"),
            ("steps/two/instruction.md", "Then."),
            ("steps/two/workdir/second", "brought"),
            ("steps/two/tests/test.sh", "judge"),
            ("steps/three/instruction.md", "Last."),
            ("steps/three/workdir/third", "brought"),
            ("steps/three/tests/test.sh", "judge"),
        ],
    );
    // Whether the check of the second step fails where nothing was done: the third is come to all the same.
    for is_sick in [false, true] {
        let way = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&way);
        let backend = Scripted::new(move |inside, line, command| {
            let is_control = inside.number > 0;
            let note = |what: &str| {
                if is_control {
                    noted.lock().unwrap().push(what.to_owned());
                }
            };
            let has_third = inside.has("/workspace/third");
            if line.contains("healthy") {
                note(if has_third { "third" } else { "second" });
                return match is_control && is_sick && !has_third {
                    true => Err(FAILED),
                    false => Ok(String::new()),
                };
            }
            if is_verifier(command) {
                note("judge");
                // The last verifier breaks in the policy's actor alone.
                match is_control || !has_third {
                    true => inside.write(REWARD, "1"),
                    false => drop(inside.files.remove(Path::new(REWARD))),
                }
            }
            Ok(String::new())
        });
        let place = place(&backend);
        let mut environment = environment(&place, &task);
        for _ in 0..2 {
            assert!(!submit(&mut environment).done);
        }
        let result = submit(&mut environment);
        let (done, reward, status) = end(&result);
        assert_eq!((done, status), (true, Some(EpisodeStatus::Failed)));
        assert!((reward.unwrap() - 2.0 / 3.0).abs() < 1e-9, "{result:?}");
        let way = way.lock().unwrap().join(" ");
        assert_eq!(way, "judge second judge third judge");
    }
}

/// How the next step begins in the policy's actor, and with the control of that time.
#[test]
fn a_step_that_begins_late_is_compared_with_a_control_of_its_own_time() {
    let folder = tempfile::tempdir().unwrap();
    let brought = ("steps/two/workdir/second", "brought");
    let task = task(folder.path(), &[&STEPS[..], &[brought]].concat());
    for what in ["healthy", "put /workspace"] {
        for (in_control, expected) in [(None, HALF), (Some(late()), OURS), (Some(FAILED), OURS)] {
            // Even are the policy's actors, odd the controls'.
            let episode = Arc::new(AtomicUsize::new(0));
            let (now, second) = (Arc::clone(&episode), in_control.clone());
            let backend = Scripted::new(move |inside, line, command| {
                if is_verifier(command) {
                    inside.write(REWARD, "1");
                }
                if !line.contains(what) {
                    return Ok(String::new());
                }
                let ending = match (now.load(Ordering::SeqCst), inside.number % 2) {
                    (0, 0) => Some(FAILED),
                    (0, _) => None,
                    (_, 0) => Some(late()),
                    (_, _) => second.clone(),
                };
                ending.map_or(Ok(String::new()), Err)
            });
            let place = place(&backend);
            // First it fails by itself, and the control finds that it need not.
            let result = submit(&mut environment(&place, &task));
            assert_eq!(end(&result), HALF, "{what}: {result:?}");
            // That says nothing of the time of the second.
            episode.store(1, Ordering::SeqCst);
            let result = submit(&mut environment(&place, &task));
            assert_eq!(end(&result), expected, "{what} {in_control:?}: {result:?}");
            assert_eq!((backend.started(), backend.live()), (4, 0));
        }
    }
}

/// One moment in which a check is late is not held against anybody.
#[test]
fn a_check_that_is_late_is_made_once_more() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &STEPS);
    let tries = AtomicUsize::new(0);
    let backend = Scripted::new(move |inside, line, command| {
        if is_verifier(command) {
            inside.write(REWARD, "1");
        }
        match line.contains("healthy") && tries.fetch_add(1, Ordering::SeqCst) == 0 {
            true => Err(late()),
            false => Ok(String::new()),
        }
    });
    let place = place(&backend);
    let result = submit(&mut environment(&place, &task));
    assert!(!result.done, "{result:?}");
}

/// What is moved late for the judgement, in the policy's actor or to the verifier's.
#[test]
fn trees_that_are_late_are_compared_with_a_control_of_their_own_time() {
    let folder = tempfile::tempdir().unwrap();
    let config = "artifacts = [\"/a\"]\n[environment]\ndocker_image = \"a\"\n[verifier]\n\
                  environment_mode = \"separate\"\n";
    let task = task(folder.path(), &[("task.toml", config), PLAIN[1], PLAIN[2]]);
    for what in ["get /a", "put /tests", "get /logs/verifier"] {
        for control_is_late in [false, true] {
            // An episode has two actors, and its control two more.
            let backend = Scripted::new(move |inside, line, command| {
                inside.write("/a", "answer");
                if is_verifier(command) {
                    inside.write(REWARD, "1");
                }
                match line.contains(what) && (inside.number < 2 || control_is_late) {
                    true => Err(late()),
                    false => Ok(String::new()),
                }
            });
            let place = place(&backend);
            let result = environment(&place, &task).close(None);
            let expected = match control_is_late {
                true => OURS,
                false => FAILED_WITH_0,
            };
            assert_eq!(end(&result), expected, "{what}: {result:?}");
            assert_eq!(backend.live(), 0);
        }
    }
}

/// What the policy left is in the way, or the task itself.
#[test]
fn a_step_that_is_not_taken_is_the_policys_doing_where_it_is_without() {
    let folder = tempfile::tempdir().unwrap();
    let brought = ("steps/two/workdir/second", "brought");
    let task = task(folder.path(), &[&STEPS[..], &[brought]].concat());
    for (fails_everywhere, expected) in [(false, HALF), (true, OURS)] {
        let backend = Scripted::new(move |inside, line, command| {
            if is_verifier(command) {
                inside.write(REWARD, "1");
            }
            match line == "put /workspace" && (fails_everywhere || inside.number == 0) {
                true => Err(FAILED),
                false => Ok(String::new()),
            }
        });
        let place = place(&backend);
        let result = submit(&mut environment(&place, &task));
        assert_eq!(end(&result), expected, "{result:?}");
        assert_eq!((backend.started(), backend.live()), (2, 0));
    }
}

/// What a task brings is no policy's doing.
#[test]
fn a_folder_of_a_task_that_is_too_large_is_named_with_what_helps() {
    let folder = tempfile::tempdir().unwrap();
    let brought = ("steps/two/workdir/second", "brought");
    let task = task(folder.path(), &[&STEPS[..], &[brought]].concat());
    let large = folder.path().join("steps/two/workdir/second");
    // It has no blocks.
    let file = fs_err::OpenOptions::new().write(true).open(large).unwrap();
    file.set_len((256 << 20) + 1).unwrap();
    let backend = Scripted::new(|inside, _, command| {
        if is_verifier(command) {
            inside.write(REWARD, "1");
        }
        Ok(String::new())
    });
    let place = place(&backend);
    let turn = ParsedTurn {
        tool_calls: vec![Ok(ToolCall::new("submit", json!({})))],
        ..ParsedTurn::default()
    };
    let error = environment(&place, &task).step(&turn).unwrap_err();
    let told = crate::causes::with_causes(&error);
    assert!(told.contains("steps/two/workdir"), "{told}");
    assert!(
        told.contains("268435456 bytes; raise `actor.artifacts`"),
        "{told}"
    );
    assert_eq!(backend.started(), 1, "no control is asked");
}

/// Else policies could make it late by what they do with their tools.
#[test]
fn what_is_judged_comes_before_what_policies_do() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(
        folder.path(),
        &[&STEPS[..], &[("task.toml", &with_separate())]].concat(),
    );
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let backend = Scripted::new(move |inside, line, command| {
        let what = match line {
            _ if is_verifier(command) => "judge",
            _ if line.contains("healthy") => "check",
            _ if line.contains("work-on") => "work",
            _ => return Ok(String::new()),
        };
        noted.lock().unwrap().push((what, inside.is_first));
        if is_verifier(command) {
            inside.write(REWARD, "1");
        }
        Ok(String::new())
    });
    let place = place(&backend);
    let mut environment = environment(&place, &task);
    let work = ParsedTurn {
        tool_calls: vec![Ok(ToolCall::new("bash", json!({ "command": "work-on" })))],
        ..ParsedTurn::default()
    };
    for is_last in [false, true] {
        assert!(!environment.step(&work).unwrap().done);
        assert_eq!(submit(&mut environment).done, is_last);
    }
    let seen = seen.lock().unwrap();
    let expected = [
        ("work", false),
        ("judge", true),
        ("check", true),
        ("work", false),
        ("judge", true),
    ];
    assert_eq!(*seen, expected);
}

/// The configuration of [`STEPS`], with a verifier of its own for the second.
fn with_separate() -> String {
    let second = "[steps.verifier]\nenvironment_mode = \"separate\"\n";
    format!("{}{second}", STEPS[0].1)
}
