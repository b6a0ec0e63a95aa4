//! The processor, and which of our kernels run on it.

use super::Scope;
use super::finding::Finding;
use crate::engine::model::ops::CpuKernels;

pub(super) fn check(_scope: &Scope) -> Vec<Finding> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    vec![judge(threads, CpuKernels::best())]
}

fn judge(threads: usize, kernels: CpuKernels) -> Finding {
    let bf16 = match kernels.has_bf16 {
        true => "with the instruction for it",
        false => "with other instructions, to the same bits and slower",
    };
    let about = format!(
        "{threads} threads; products in f32 run on {}, in bf16 {bf16}",
        kernels.single
    );
    // Nothing fails without vectors, so it is no fault.
    let is_slow = kernels.single == "plain" && cfg!(target_arch = "x86_64");
    let fix =
        is_slow.then(|| "take a machine with AVX2, which is several times as fast".to_owned());
    match fix {
        Some(fix) => Finding::missing("cpu", false, about, fix),
        None => Finding::fine("cpu", about),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    #[test]
    fn the_kernels_that_run_are_named() {
        let judged = |single, has_bf16| judge(8, CpuKernels { single, has_bf16 });
        let best = judged("AVX-512", true);
        assert_eq!(best.state, State::Fine);
        assert!(
            best.about
                .contains("f32 run on AVX-512, in bf16 with the instruction")
        );
        assert!(judged("AVX2", false).about.contains("slower"));
        if cfg!(target_arch = "x86_64") {
            assert_eq!(judged("plain", false).state, State::Note);
        }
    }
}
