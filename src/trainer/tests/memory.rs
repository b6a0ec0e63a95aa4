//! Steps whose passes take too much memory are those of smaller passes, to the bit.

use super::ranks::{Bits, bits, config, gae, groups, trainer};
use super::*;
use crate::collective::tests_support::{QUICK, launches, on_ranks};
use crate::collective::{Collective, Solo};
use crate::trainer::memory::tests::Scripted;
use crate::trajectory::TokenTrace;

/// What two steps made, how micro-batches went in the end, and what was done in the first.
type TwoSteps = (Bits, [StepMetrics; 2], MicroBatches, Vec<MemoryChange>);

/// Takes two steps, the first of which may be made smaller.
fn two_steps(
    decoder: &Decoder,
    config: &GrpoConfig,
    guard: Option<MemoryGuard>,
    ranks: &dyn Collective,
) -> TwoSteps {
    let mut trainer = trainer(config.clone(), decoder).with_memory_guard(guard);
    let groups = groups();
    let first = trainer.step(decoder, &groups, ranks).unwrap();
    let changes = trainer.take_memory_changes();
    let second = trainer.step(decoder, &groups[1..3], ranks).unwrap();
    let now = trainer.micro_batches();
    (bits(decoder, &trainer), [first, second], now, changes)
}

/// Holds what two steps made to be what they make whose passes were so small from the first on.
fn assert_smaller(config: &GrpoConfig, found: &TwoSteps, place: usize) {
    let smaller = GrpoConfig {
        micro_batch_tokens: found.2.micro_batch_tokens,
        pass: PassConfig {
            recompute: found.2.recompute,
            ..config.pass
        },
        ..config.clone()
    };
    assert!(smaller != *config, "{place}");
    let decoder = decoder(ModelType::Qwen3, DType::F32, &lora());
    let expected = two_steps(&decoder, &smaller, None, &Solo);
    assert_eq!(found.1, expected.1, "{place}");
    assert!(found.0 == expected.0, "{place}");
}

#[rstest]
#[case::one_pass(config(), 1, 4)]
#[case::old_scores(GrpoConfig { recompute_old: true, ..config() }, 2, 8)]
#[case::references_values_and_two_passes(gae(), 5, 16)]
fn a_step_that_is_done_again_has_the_bits_of_smaller_passes(
    #[case] config: GrpoConfig,
    #[case] stride: usize,
    #[case] least: usize,
) {
    let fresh = || decoder(ModelType::Qwen3, DType::F32, &lora());
    let plain = two_steps(&fresh(), &config, None, &Solo);
    assert!(plain.3.is_empty());
    // Wherever in the step it happens: also behind passes whose gradients were added already, or applied.
    let mut place = 0;
    loop {
        let guard = Scripted::above_at(&[place]);
        let found = two_steps(&fresh(), &config, Some(guard), &Solo);
        let [change] = found.3[..] else {
            break;
        };
        assert_eq!(change.after, Some(found.2), "{place}");
        assert_smaller(&config, &found, place);
        place += stride;
    }
    assert!(place >= least, "{place}");
    // Twice in a step.
    let guard = Scripted::above_at(&[1, 3]);
    let found = two_steps(&fresh(), &config, Some(guard), &Solo);
    assert_eq!(found.3.len(), 2);
    assert_smaller(&config, &found, 1);
    // Measuring alone changes nothing.
    let watched = two_steps(&fresh(), &config, Some(Scripted::above_at(&[])), &Solo);
    assert!(watched.0 == plain.0 && watched.3.is_empty());
}

#[test]
fn processes_make_their_passes_smaller_together() {
    let fresh = || decoder(ModelType::Qwen3, DType::F32, &lora());
    let config = gae();
    let found = on_ranks(&launches(3), QUICK, |ranks| {
        // The second of them finds out.
        let above: &[usize] = if ranks.rank() == 1 { &[1] } else { &[] };
        let guard = Scripted::above_at(above);
        two_steps(&fresh(), &config, Some(guard), &ranks)
    });
    let now = found[0].2;
    assert!(now.recompute && now.micro_batch_tokens <= 20, "{now:?}");
    let smaller = GrpoConfig {
        micro_batch_tokens: now.micro_batch_tokens,
        pass: PassConfig {
            recompute: true,
            ..config.pass
        },
        ..config
    };
    let expected = two_steps(&fresh(), &smaller, None, &Solo);
    for (rank, found) in found.iter().enumerate() {
        assert_eq!(found.2, now, "rank {rank}");
        assert_eq!(found.3.len(), 1, "rank {rank}");
        assert!(found.0 == expected.0, "rank {rank}");
    }
}

#[test]
fn imitation_keeps_within_its_memory_too() {
    let traces: Vec<TokenTrace> = (0..6)
        .map(|index| {
            let mut trace = TokenTrace::new();
            trace.push_prompt(&[1, index]).unwrap();
            let tokens = random_tokens(5 + index as usize, 19, u64::from(index));
            trace
                .push_sampled(&tokens, &vec![-1.0; tokens.len()])
                .unwrap();
            trace
        })
        .collect();
    let learn = |micro: MicroBatches, guard: Option<MemoryGuard>| {
        let decoder = decoder(ModelType::Qwen3, DType::F32, &lora());
        let config = SftConfig {
            batch_size: 6,
            micro_batch_tokens: micro.micro_batch_tokens,
            recompute: micro.recompute,
            seed: 0,
        };
        let schedule = LrSchedule {
            learning_rate: 1e-2,
            warmup_steps: 0,
            total_steps: 3,
            kind: ScheduleKind::Constant,
        };
        let optimizer = AdamW::new(&decoder, AdamWConfig::default()).unwrap();
        let mut trainer = SftTrainer::new(&traces, config, schedule, optimizer)
            .unwrap()
            .with_memory_guard(guard);
        let losses = [(); 3].map(|()| trainer.step(&decoder).unwrap());
        let read = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let weights = decoder.variables().iter().map(|(_, var)| read(var));
        (
            losses,
            weights.collect::<Vec<_>>(),
            trainer.take_memory_changes(),
        )
    };
    let chosen = MicroBatches {
        micro_batch_tokens: 30,
        recompute: false,
    };
    // The first step's second pass, and the first pass of the step that is done again for it.
    let found = learn(chosen, Some(Scripted::above_at(&[1, 2])));
    let [first, second] = found.2.try_into().unwrap();
    assert!(first.after.is_some_and(|after| after.recompute));
    let after = second.after.unwrap();
    assert!(after.micro_batch_tokens < 20, "{after:?}");
    let expected = learn(after, None);
    assert_eq!(found.0, expected.0);
    assert!(found.1 == expected.1);
}
