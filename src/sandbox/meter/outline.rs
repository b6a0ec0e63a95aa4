//! One function in outline: what it calls, and how much work to expect of it and of its loops.

use wasmparser::{FunctionBody, Operator};

/// How often a `br_if` is expected to leave: most lead to a function's rare cases.
const LEAVES: f64 = 0.25;

/// A function with code.
#[derive(Debug, Default)]
pub(super) struct Function {
    pub(super) ty: u32,
    /// All operators.
    pub(super) operators: u32,
    /// The part outside of its loops.
    pub(super) work: Work,
    /// Its loops in the order of their heads.
    pub(super) loops: Vec<Loop>,
    /// Whether it has bulk memory instructions.
    pub(super) has_bulk: bool,
    /// Numbers of the functions with code that it calls.
    pub(super) calls: Vec<u32>,
    /// Types of its indirect calls.
    pub(super) indirect_calls: Vec<u32>,
}

/// A loop.
#[derive(Debug, Default)]
pub(super) struct Loop {
    /// One iteration, without the loops in it.
    pub(super) work: Work,
    pub(super) has_loop: bool,
    /// Whether it, or a loop in it, calls `meter.refill`.
    pub(super) is_marked: bool,
}

/// The work to expect of a stretch of code that is entered once.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Counted as wasmtime counts fuel.
    pub(super) operators: f64,
    /// Called functions with code, and how often each call is expected.
    pub(super) calls: Vec<(u32, f64)>,
    pub(super) calls_indirectly: bool,
}

/// An open block, and the flow of control through it: how often one expects to be where.
///
/// In a loop the unit is one iteration.
struct Block {
    kind: Kind,
    /// Before it.
    entered: f64,
    /// Branches to its label. Those that repeat a loop count as leaving it.
    branches: f64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Block,
    Loop(usize),
    If,
    Else,
}

impl Function {
    /// Reads a body of type `ty`. Functions below `imports` are the host's.
    pub(super) fn outline(
        ty: u32,
        body: &FunctionBody<'_>,
        imports: u32,
        refill: Option<u32>,
    ) -> wasmparser::Result<Self> {
        let mut function = Self {
            ty,
            ..Self::default()
        };
        let mut flow = Flow {
            here: 1.0,
            blocks: Vec::new(),
        };
        let mut operators = body.get_operators_reader()?;
        while !operators.eof() {
            let operator = operators.read()?;
            let innermost = flow.loops().next();
            let times = flow.here;
            if let Operator::Call { function_index } = operator
                && Some(function_index) == refill
            {
                for index in flow.loops() {
                    function.loops[index].is_marked = true;
                }
            }
            let work = match innermost {
                Some(index) => &mut function.loops[index].work,
                None => &mut function.work,
            };
            if !is_free(&operator) {
                function.operators += 1;
                work.operators += times;
            }
            match operator {
                Operator::Call { function_index } | Operator::ReturnCall { function_index } => {
                    if let Some(callee) = function_index.checked_sub(imports) {
                        work.calls.push((callee, times));
                        function.calls.push(callee);
                    }
                }
                Operator::CallIndirect { type_index, .. }
                | Operator::ReturnCallIndirect { type_index, .. } => {
                    work.calls_indirectly = true;
                    function.indirect_calls.push(type_index);
                }
                Operator::MemoryCopy { .. } | Operator::MemoryFill { .. } => {
                    function.has_bulk = true;
                }
                Operator::Loop { .. } => {
                    if let Some(index) = innermost {
                        function.loops[index].has_loop = true;
                    }
                    flow.open(Kind::Loop(function.loops.len()));
                    function.loops.push(Loop::default());
                }
                _ => {}
            }
            flow.pass(&operator)?;
        }
        function.calls.sort_unstable();
        function.calls.dedup();
        function.indirect_calls.sort_unstable();
        function.indirect_calls.dedup();
        Ok(function)
    }
}

/// The flow of control through structured code.
struct Flow {
    here: f64,
    blocks: Vec<Block>,
}

impl Flow {
    /// The open loops, from the innermost.
    fn loops(&self) -> impl Iterator<Item = usize> {
        self.blocks
            .iter()
            .rev()
            .filter_map(|block| match block.kind {
                Kind::Loop(index) => Some(index),
                Kind::Block | Kind::If | Kind::Else => None,
            })
    }

    fn open(&mut self, kind: Kind) {
        self.blocks.push(Block {
            kind,
            entered: self.here,
            branches: 0.0,
        });
        match kind {
            Kind::Loop(_) => self.here = 1.0,
            Kind::If | Kind::Else => self.here *= 0.5,
            Kind::Block => {}
        }
    }

    fn branch(&mut self, depth: u32, mut flow: f64) {
        for block in self.blocks.iter_mut().rev().take(depth as usize) {
            if let Kind::Loop(_) = block.kind {
                flow *= block.entered;
            }
        }
        // The outermost label is the function's end.
        if let Some(target) = self.blocks.iter_mut().rev().nth(depth as usize) {
            target.branches += flow;
        }
    }

    fn pass(&mut self, operator: &Operator<'_>) -> wasmparser::Result<()> {
        match operator {
            Operator::Block { .. } => self.open(Kind::Block),
            Operator::If { .. } => self.open(Kind::If),
            Operator::Else => {
                if let Some(block) = self.blocks.pop() {
                    let branches = block.branches + self.here;
                    self.here = block.entered;
                    self.open(Kind::Else);
                    if let Some(block) = self.blocks.last_mut() {
                        block.branches = branches;
                    }
                }
            }
            Operator::End => {
                if let Some(block) = self.blocks.pop() {
                    self.here += block.branches;
                    match block.kind {
                        Kind::Loop(_) => self.here *= block.entered,
                        Kind::If => self.here += block.entered * 0.5,
                        Kind::Block | Kind::Else => {}
                    }
                }
            }
            Operator::Br { relative_depth } => {
                self.branch(*relative_depth, self.here);
                self.here = 0.0;
            }
            Operator::BrIf { relative_depth } => {
                self.branch(*relative_depth, self.here * LEAVES);
                self.here *= 1.0 - LEAVES;
            }
            Operator::BrTable { targets } => {
                let share = self.here / f64::from(targets.len() + 1);
                for target in targets.targets() {
                    self.branch(target?, share);
                }
                self.branch(targets.default(), share);
                self.here = 0.0;
            }
            Operator::Return
            | Operator::Unreachable
            | Operator::ReturnCall { .. }
            | Operator::ReturnCallIndirect { .. } => self.here = 0.0,
            _ => {}
        }
        Ok(())
    }
}

/// Whether wasmtime counts the operator as no fuel.
fn is_free(operator: &Operator<'_>) -> bool {
    matches!(
        operator,
        Operator::Nop
            | Operator::Drop
            | Operator::Block { .. }
            | Operator::Loop { .. }
            | Operator::Unreachable
            | Operator::Return
            | Operator::Else
            | Operator::End
    )
}
