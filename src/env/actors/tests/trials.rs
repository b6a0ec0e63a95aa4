use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// The policy's actor is the first; the check fails there alone, or wherever it is asked.
#[test]
fn a_step_that_does_not_begin_is_the_policys_doing_where_it_begins_without() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &STEPS);
    for fails_everywhere in [false, true] {
        let backend = Scripted::new(move |inside, line, command| {
            if is_verifier(command) {
                inside.write(REWARD, "1");
            }
            match line.contains("healthy") && (fails_everywhere || inside.number == 0) {
                true => Err(FAILED),
                false => Ok(String::new()),
            }
        });
        let place = place(&backend);
        let result = submit(&mut environment(&place, &task));
        let expected = match fails_everywhere {
            true => OURS,
            // The first step's reward is kept, the other's is none.
            false => (true, Some(0.5), Some(EpisodeStatus::Failed)),
        };
        assert_eq!(end(&result), expected, "{result:?}");
        assert_eq!(result.fault.is_some(), fails_everywhere);
        assert_eq!((backend.started(), backend.live()), (2, 0));
    }
}

/// A step may be ready only where the one before was done.
#[test]
fn a_step_begins_without_the_policy_where_the_reference_was() {
    let folder = tempfile::tempdir().unwrap();
    let solution = ("steps/one/solution/solve.sh", "solve");
    let task = task(folder.path(), &[&STEPS[..], &[solution]].concat());
    let backend = Scripted::new(|inside, line, command| {
        if is_verifier(command) {
            inside.write(REWARD, "1");
        }
        if line.contains("solve.sh") {
            inside.write("/solved", "");
        }
        match line.contains("healthy") && !inside.has("/solved") {
            true => Err(FAILED),
            false => Ok(String::new()),
        }
    });
    let place = place(&backend);
    let result = submit(&mut environment(&place, &task));
    let expected = (true, Some(0.5), Some(EpisodeStatus::Failed));
    assert_eq!(end(&result), expected, "{result:?}");
}

/// How a verifier of a task behaves: where it leaves a reward, and whether the reference works.
#[test]
fn the_control_of_a_verifier_is_the_reference_where_it_works() {
    let plain = tempfile::tempdir().unwrap();
    let plain = task(plain.path(), &PLAIN);
    let with_solution = tempfile::tempdir().unwrap();
    let with_solution = task(with_solution.path(), &[&PLAIN[..], &[SOLUTION]].concat());
    // Whether there is a reference, whether it works, and whether the verifier leaves a reward for what is
    // untouched and for what is solved.
    for (has_solution, works, untouched, solved, expected) in [
        (false, false, true, false, FAILED_WITH_0),
        (false, false, false, false, OURS),
        // One that leaves none where nothing was done.
        (true, true, false, true, FAILED_WITH_0),
        // One that breaks only where the task is solved.
        (true, true, true, false, OURS),
        (true, true, true, true, FAILED_WITH_0),
        // A reference that wants a network says nothing.
        (true, false, true, false, FAILED_WITH_0),
        (true, false, false, true, OURS),
    ] {
        let backend = Scripted::new(move |inside, line, command| {
            if line.contains("solve.sh") {
                assert!(inside.has("/solution/solve.sh") && inside.number > 0);
                if !works {
                    return Err(FAILED);
                }
                inside.write("/solved", "");
            }
            let leaves = match inside.has("/solved") {
                true => solved,
                false => untouched,
            };
            // In the policy's actor it leaves none.
            if is_verifier(command) && leaves && inside.number > 0 {
                inside.write(REWARD, "1");
            }
            Ok(String::new())
        });
        let task = match has_solution {
            true => &with_solution,
            false => &plain,
        };
        let place = place(&backend);
        let result = submit(&mut environment(&place, task));
        let case = (has_solution, works, untouched, solved);
        assert_eq!(end(&result), expected, "{case:?}: {result:?}");
        assert_eq!(backend.live(), 0);
    }
}

/// A verifier that is late may be so by what others do to this machine.
#[test]
fn who_is_late_once_is_judged_again_and_is_held_to_it_where_the_control_is_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &PLAIN);
    // How often the policy's verifier is late, and whether the control's is.
    for (times, control_is_late, expected) in [
        (1, false, (true, Some(1.0), Some(EpisodeStatus::Passed))),
        (2, false, FAILED_WITH_0),
        (2, true, OURS),
    ] {
        let tries = AtomicUsize::new(0);
        let backend = Scripted::new(move |inside, _, command| {
            if is_verifier(command) {
                let is_late = match inside.number {
                    0 => tries.fetch_add(1, Ordering::SeqCst) < times,
                    _ => control_is_late,
                };
                if is_late {
                    return Err(late());
                }
                inside.write(REWARD, "1");
            }
            Ok(String::new())
        });
        let place = place(&backend);
        let result = submit(&mut environment(&place, &task));
        assert_eq!(end(&result), expected, "{times}: {result:?}");
    }
}

/// It does not sleep on when the run has ended.
#[test]
fn who_waits_for_a_sandbox_is_let_go_when_the_run_ends() {
    let folder = tempfile::tempdir().unwrap();
    let config = "[environment]\ndocker_image = \"a\"\n[environment.healthcheck]\ncommand = \"healthy\"\n\
                  interval_sec = 100000\n";
    let task = task(folder.path(), &[("task.toml", config), PLAIN[1], PLAIN[2]]);
    let (sender, asked) = std::sync::mpsc::channel();
    let backend = Scripted::new(move |_, line, _| {
        if line.contains("healthy") {
            let _ = sender.send(());
            return Err(FAILED);
        }
        Ok(String::new())
    });
    let place = place(&backend);
    let mut environment = environment(&place, &task);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| environment.close(None));
        asked.recv().unwrap();
        place.close();
        let result = waiting.join().unwrap();
        assert_eq!(end(&result), OURS);
        assert!(result.fault.unwrap().contains("the run ends"));
    });
    assert_eq!(backend.live(), 0);
}

/// An agent's tools wait for room before the agent begins, and for no longer than the run goes on.
#[test]
fn tools_are_opened_once_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &PLAIN);
    let backend = Scripted::new(|_, _, _| Ok(String::new()));
    let place = place(&backend);
    let [mut first, mut second] = [(); 2].map(|()| environment(&place, &task));
    first.open_tools(&|| false).unwrap();
    assert_eq!(backend.live(), 1);
    let looks = AtomicUsize::new(0);
    second
        .open_tools(&|| looks.fetch_add(1, Ordering::SeqCst) > 3)
        .unwrap_err();
    assert_eq!(backend.started(), 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| second.open_tools(&|| false));
        drop(first);
        waiting.join().unwrap().unwrap();
    });
    assert_eq!((backend.started(), backend.live()), (2, 1));
}

/// More than there may be of artifacts is the policy's doing where the reference has fewer; how many there are is told.
#[test]
fn artifacts_have_one_limit_together() {
    let folder = tempfile::tempdir().unwrap();
    let config = "artifacts = [\"/a\", \"/b\"]\n[environment]\ndocker_image = \"a\"\n[verifier]\n\
                  environment_mode = \"separate\"\n";
    let task = task(
        folder.path(),
        &[("task.toml", config), PLAIN[1], PLAIN[2], SOLUTION],
    );
    // Of the policy's, and of the reference's; there may be 100 bytes.
    for (own, of_reference, expected) in [
        (50, 0, (true, Some(1.0), Some(EpisodeStatus::Passed))),
        (51, 50, FAILED_WITH_0),
        (51, 51, OURS),
    ] {
        let backend = Scripted::new(move |inside, line, command| {
            let size = match inside.number {
                0 if line.contains("mkdir") => own,
                _ if line.contains("solve.sh") => of_reference,
                _ => 0,
            };
            if size > 0 {
                inside.write("/a", &"x".repeat(size));
                inside.write("/b", &"x".repeat(size));
            }
            if is_verifier(command) {
                assert!(inside.number > 0 && inside.has("/a") && inside.has("/b"));
                inside.write(REWARD, "1");
            }
            Ok(String::new())
        });
        let place = place(&backend);
        let mut environment = environment(&place, &task);
        let result = match expected {
            // What is the task's fault is told as ours.
            OURS => environment.close(None),
            _ => submit(&mut environment),
        };
        assert_eq!(end(&result), expected, "{own}: {result:?}");
        let told = result.fault.unwrap_or_default();
        assert_eq!(
            told.contains("more than 100 bytes together"),
            expected == OURS,
            "{told}"
        );
        assert_eq!(backend.live(), 0);
    }
}
