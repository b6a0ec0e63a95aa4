use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::handshake::{Hello, introduce, read_verdict};
use super::sum::nodes_of;
use super::tests_support::{QUICK, join, launches, on_ranks};
use super::*;

#[test]
fn all_ranks_learn_what_each_gives() {
    for world_size in 2..5 {
        let results = on_ranks(&launches(world_size), QUICK, |ranks| {
            let own = vec![u8::try_from(ranks.rank()).unwrap(); ranks.rank() * 1_000_000];
            let bytes = ranks.all_gather("gathering", own).unwrap();
            ranks.barrier("meeting").unwrap();
            let numbers = [f64::NAN, -0.0, ranks.rank() as f64];
            let numbers = ranks.all_gather_numbers("counting", &numbers).unwrap();
            let is_any = ranks.any("asking", ranks.rank() == 1).unwrap();
            let is_none = ranks.any("asking again", false).unwrap();
            let share = ranks.share(7);
            (bytes, numbers, is_any, is_none, share)
        });
        let mut next = 0;
        for (bytes, numbers, is_any, is_none, share) in results {
            let lengths: Vec<usize> = bytes.iter().map(Vec::len).collect();
            let expected: Vec<usize> = (0..world_size).map(|rank| rank * 1_000_000).collect();
            assert_eq!(lengths, expected);
            assert!(bytes[1].iter().all(|byte| *byte == 1));
            for (rank, numbers) in numbers.iter().enumerate() {
                assert!(numbers[0].is_nan() && numbers[1].is_sign_negative());
                assert_eq!(numbers[2], rank as f64);
            }
            assert!(is_any && !is_none);
            assert_eq!(share.start, next, "shares follow each other");
            next = share.end;
        }
        assert_eq!(next, 7);
    }
}

/// Parts of sums whose bits depend on the order.
fn part(index: usize) -> Vec<f32> {
    // More than goes over the wire at a time.
    (0..1_200_000)
        .map(|i| ((i * 7 + index * 13) % 1009) as f32 * [0.01, 3.3, 0.7, 100.1, 0.003][index])
        .collect()
}

#[test]
fn a_sum_has_the_same_bits_for_any_number_of_ranks() {
    const PARTS: usize = 5;
    let mut alone = OrderedSum::new(PARTS);
    for index in 0..PARTS {
        alone.push(index, Numbers::F32(part(index))).unwrap();
    }
    let Numbers::F32(alone) = Solo.sum("summing", alone).unwrap() else {
        panic!("a sum is of its parts' kind");
    };
    // What the test is about: another order has other bits.
    let mut in_turn = vec![0.0; alone.len()];
    for index in 0..PARTS {
        let part = part(index);
        in_turn.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    assert_ne!(alone, in_turn);
    for world_size in [2, 3, 5] {
        let sums = on_ranks(&launches(world_size), QUICK, |ranks| {
            let mut sum = OrderedSum::new(PARTS);
            for index in ranks.share(PARTS) {
                sum.push_node(index..index + 1, Numbers::F32(part(index)))
                    .unwrap();
            }
            ranks.sum("summing", sum).unwrap()
        });
        for sum in sums {
            assert!(sum == Numbers::F32(alone.clone()), "{world_size} ranks");
        }
    }
}

#[test]
fn a_sum_holds_few_vectors_and_wants_each_part_once() {
    for total in 1..20 {
        let mut sum = OrderedSum::new(total);
        for index in 0..total {
            sum.push(index, Numbers::F64(vec![index as f64])).unwrap();
            let depth = total.next_power_of_two().trailing_zeros() as usize;
            assert!(sum.nodes().len() <= depth + 1, "{total} {index}");
            // What is there is what the tree has of the parts so far.
            let ranges: Vec<_> = sum.nodes().iter().map(|(range, _)| range.clone()).collect();
            assert_eq!(ranges, nodes_of(&(0..index + 1), total));
        }
        let expected = (0..total).sum::<usize>() as f64;
        assert_eq!(sum.finish().unwrap(), Numbers::F64(vec![expected]));
    }
    let one = || Numbers::F32(vec![1.0]);
    let mut sum = OrderedSum::new(2);
    sum.push(0, one()).unwrap();
    assert!(sum.clone().finish().is_err(), "a part is missing");
    assert!(sum.push(0, one()).is_err(), "a part twice");
    assert!(sum.push(1, Numbers::F32(vec![1.0; 2])).is_err(), "length");
    assert!(sum.push(1, Numbers::F64(vec![1.0])).is_err(), "kind");
    sum.push(1, one()).unwrap();
    assert!(sum.push(2, one()).is_err(), "a part too many");
}

#[test]
fn a_rank_that_ends_is_named_to_all_others_at_once() {
    let launches = launches(3);
    let started = Instant::now();
    let found = on_ranks(&launches, QUICK, |ranks| {
        if ranks.rank() == 1 {
            // As the kernel ends the connections of a killed process.
            ranks.cut_for_tests();
            return String::new();
        }
        let error = ranks.barrier("meeting").unwrap_err();
        assert!(
            ranks.stop().load(Ordering::Relaxed),
            "others need not go on"
        );
        error.to_string()
    });
    assert!(started.elapsed() < QUICK.patience, "it is not waited for");
    assert!(
        found[0].contains("rank 1 is lost while meeting"),
        "{found:?}"
    );
    assert!(found[2].contains("rank 1 ended the run"), "{found:?}");

    let found = on_ranks(&self::launches(3), QUICK, |ranks| {
        if ranks.rank() == 0 {
            ranks.cut_for_tests();
            return String::new();
        }
        ranks.barrier("meeting").unwrap_err().to_string()
    });
    for error in &found[1..] {
        assert!(error.contains("rank 0 is lost while meeting"), "{error}");
    }
}

#[test]
fn a_rank_that_gives_up_says_why_to_all_others() {
    let found = on_ranks(&launches(3), QUICK, |ranks| {
        if ranks.rank() == 2 {
            ranks.abort("the disk is full");
            return String::new();
        }
        ranks.barrier("meeting").unwrap_err().to_string()
    });
    for error in &found[..2] {
        assert_eq!(error, "rank 2 ended the run: the disk is full");
    }
    // And so does the root.
    let found = on_ranks(&launches(2), QUICK, |ranks| {
        if ranks.rank() == 0 {
            ranks.abort("the disk is full");
            return String::new();
        }
        ranks.barrier("meeting").unwrap_err().to_string()
    });
    assert_eq!(found[1], "rank 0 ended the run: the disk is full");
}

#[test]
fn a_slow_rank_is_waited_for_and_a_silent_one_is_not() {
    let slow = QUICK.silence * 5 / 4;
    on_ranks(&launches(2), QUICK, |ranks| {
        if ranks.rank() == 1 {
            std::thread::sleep(slow);
        }
        ranks.barrier("meeting").unwrap();
    });

    // One that joins and then says nothing, as a machine that lost its network.
    let launches = launches(2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| {
            let ranks = join(&launches[0], "steps = 1", QUICK).unwrap();
            ranks.barrier("meeting").unwrap_err().to_string()
        });
        let mut silent = connected(&launches[1]);
        let hello = Hello::new(&launches[1], "steps = 1");
        introduce(&mut silent, &launches[1].token, &hello).unwrap();
        read_verdict(&mut silent).unwrap();
        let error = root.join().unwrap();
        assert!(
            error.contains("rank 1 is lost while meeting: it gives no sign of life"),
            "{error}"
        );
    });

    // One that lives, and never comes.
    let impatient = Timeouts {
        patience: Duration::from_millis(500),
        ..QUICK
    };
    let done = AtomicBool::new(false);
    let found = on_ranks(&self::launches(2), impatient, |ranks| {
        if ranks.rank() == 1 {
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
            return String::new();
        }
        let error = ranks.barrier("meeting").unwrap_err().to_string();
        done.store(true, Ordering::Relaxed);
        error
    });
    assert!(
        found[0].contains("rank 1 did not come to meeting"),
        "{}",
        found[0]
    );
}

#[test]
fn ranks_that_do_different_things_find_out() {
    let found = on_ranks(&launches(2), QUICK, |ranks| {
        let activity = ["sampling", "saving"][ranks.rank()];
        let error = ranks.barrier(activity).unwrap_err();
        ranks.abort(&error.to_string());
        error.to_string()
    });
    assert!(
        found[0].contains("rank 1 is at saving (number 1), this one at sampling (number 1)"),
        "{found:?}"
    );
    assert!(found[1].contains("rank 0 ended the run"), "{found:?}");
}

#[test]
fn processes_that_do_not_fit_together_are_told_what_differs() {
    let others: [fn(&mut Launch, &mut &str); 3] = [
        |_, identity| *identity = "seed = 1\nsteps = 2",
        |launch, _| launch.world_size = 4,
        |launch, _| launch.rank = 1,
    ];
    let expected = [
        "rank 2 has `steps = 2`, rank 0 `steps = 1`",
        "rank 2 has `WORLD_SIZE` 4, rank 0 3",
        "two processes have `RANK` 1",
    ];
    for (change, expected) in others.into_iter().zip(expected) {
        let mut launches = launches(3);
        let identity = "seed = 1\nsteps = 1";
        let mut other = identity;
        change(&mut launches[2], &mut other);
        let errors: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = [(0, identity), (1, identity), (2, other)]
                .map(|(rank, identity)| {
                    let launch = &launches[rank];
                    scope.spawn(move || join(launch, identity, QUICK).unwrap_err())
                })
                .into_iter()
                .collect();
            threads
                .into_iter()
                .map(|thread| {
                    let error = thread.join().unwrap();
                    assert!(error.is_usage(), "{error:?}");
                    error.to_string()
                })
                .collect()
        });
        for error in errors {
            assert!(error.contains(expected), "{error}");
        }
    }
}

fn connected(launch: &Launch) -> TcpStream {
    loop {
        if let Ok(stream) = TcpStream::connect(launch.address()) {
            return stream;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn strangers_are_turned_away_and_the_ranks_are_waited_for() {
    let launches = launches(2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| {
            let ranks = join(&launches[0], "steps = 1", QUICK).unwrap();
            ranks.barrier("meeting").unwrap();
        });
        // One that speaks another protocol, one that says nothing, one without the secret.
        let mut web = connected(&launches[0]);
        web.write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            .unwrap();
        let mut answer = Vec::new();
        let _ = web.read_to_end(&mut answer);
        assert!(answer.is_empty(), "a stranger learns nothing");
        drop(connected(&launches[0]));
        let mut guess = launches[1].clone();
        guess.token = Token::from("guess");
        let error = join(&guess, "steps = 1", QUICK).unwrap_err();
        assert!(matches!(error, CollectiveError::Token), "{error}");
        // It proves nothing by repeating what it sees.
        let mut mute = connected(&launches[0]);
        mute.write_all(b"WARDIAN1").unwrap();
        mute.write_all(&[7; 32]).unwrap();
        let mut greeting = [0; 64];
        mute.read_exact(&mut greeting).unwrap();
        mute.write_all(&greeting[32..]).unwrap();
        let hello = serde_json::to_vec(&Hello::new(&launches[1], "steps = 1")).unwrap();
        // It may have been turned away already.
        let _ = mute.write_all(&(hello.len() as u64).to_le_bytes());
        let _ = mute.write_all(&hello);
        let _ = mute.read_to_end(&mut answer);
        assert!(answer.is_empty(), "it is not let in");
        let ranks = join(&launches[1], "steps = 1", QUICK).unwrap();
        ranks.barrier("meeting").unwrap();
        root.join().unwrap();
    });
}

#[test]
fn ranks_that_never_come_are_named() {
    let short = Timeouts {
        joining: Duration::from_millis(300),
        ..QUICK
    };
    let launches = launches(3);
    let (root, peer) = std::thread::scope(|scope| {
        let root = scope.spawn(|| join(&launches[0], "", short).unwrap_err());
        let peer = scope.spawn(|| join(&launches[1], "", short).unwrap_err());
        (root.join().unwrap(), peer.join().unwrap())
    });
    assert!(
        root.to_string().starts_with("rank 2 did not join within"),
        "{root}"
    );
    assert!(
        peer.to_string().contains("rank 2 did not join within"),
        "{peer}"
    );
    let error = join(&launches[1], "", short).unwrap_err().to_string();
    assert!(
        error.starts_with("rank 0 did not answer at `127.0.0.1:"),
        "{error}"
    );
}

#[test]
fn a_rank_that_is_asked_to_stop_asks_all() {
    let launches = launches(3);
    let stopped = std::thread::scope(|scope| {
        let threads: Vec<_> = launches
            .iter()
            .map(|launch| {
                scope.spawn(move || {
                    let signalled = Arc::new(AtomicBool::new(launch.rank == 2));
                    let ranks =
                        TcpCollective::join(launch, "", QUICK, Arc::clone(&signalled)).unwrap();
                    let started = Instant::now();
                    while !ranks.stop().load(Ordering::Relaxed) {
                        assert!(started.elapsed() < QUICK.patience, "nobody told it");
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    ranks.barrier("meeting").unwrap();
                    // A signal of its own may still come, and is then its first.
                    signalled.load(Ordering::Relaxed)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect::<Vec<_>>()
    });
    assert_eq!(stopped, [false, false, true]);
}
