//! What the rewriter has to know about a module before it starts.

use std::collections::HashMap;

use wasmparser::{ElementItems, FuncType, FunctionBody, Operator, Parser, Payload, TypeRef};

use super::{MARK, METER, REFILL, malformed, unmetered};
use crate::sandbox::error::SandboxError;

/// Indices, and the code in outline.
#[derive(Debug, Default)]
pub(super) struct Shape {
    /// The number of parameters of each type.
    pub(super) parameters: Vec<u32>,
    /// A type without parameters and results, if there is one.
    pub(super) empty_type: Option<u32>,
    pub(super) imports: u32,
    /// The index of the imported `meter.refill`, if the guest has it.
    pub(super) refill: Option<u32>,
    pub(super) globals: u32,
    /// The functions with code; the first has the index `imports`.
    pub(super) functions: Vec<Function>,
    /// Whether each function's address is taken.
    is_indirect: Vec<bool>,
}

/// One function in outline. Operators are counted as wasmtime counts fuel.
#[derive(Debug, Default)]
pub(super) struct Function {
    pub(super) ty: u32,
    pub(super) operators: u32,
    /// Its loops in the order of their heads.
    pub(super) loops: Vec<Loop>,
    /// Whether it calls `meter.refill` itself.
    pub(super) is_marked: bool,
    pub(super) has_bulk: bool,
    /// Numbers of the functions with code that it calls.
    calls: Vec<u32>,
    /// Types of its indirect calls.
    indirect_calls: Vec<u32>,
}

/// One loop, without the loops in it.
#[derive(Debug, Default)]
pub(super) struct Loop {
    pub(super) operators: u32,
    pub(super) has_indirect_call: bool,
}

impl Shape {
    pub(super) fn read(wasm: &[u8]) -> Result<Self, SandboxError> {
        let mut shape = Self::default();
        let mut types: Vec<FuncType> = Vec::new();
        let mut function_types = Vec::new();
        let mut taken = Vec::new();
        for payload in Parser::new(0).parse_all(wasm) {
            match payload.map_err(malformed)? {
                Payload::TypeSection(section) => {
                    for (index, ty) in (0..).zip(section.into_iter_err_on_gc_types()) {
                        let ty = ty.map_err(malformed)?;
                        if ty.params().is_empty() && ty.results().is_empty() {
                            shape.empty_type = Some(index);
                        }
                        let count = u32::try_from(ty.params().len()).map_err(malformed)?;
                        shape.parameters.push(count);
                        types.push(ty);
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        let import = import.map_err(malformed)?;
                        if !matches!(import.ty, TypeRef::Func(_)) {
                            return Err(unmetered("it imports something that is not a function"));
                        }
                        if (import.module, import.name) == REFILL {
                            shape.refill = Some(shape.imports);
                        }
                        shape.imports += 1;
                    }
                }
                Payload::FunctionSection(section) => {
                    for ty in section {
                        function_types.push(ty.map_err(malformed)?);
                    }
                }
                Payload::GlobalSection(section) => shape.globals = section.count(),
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export.map_err(malformed)?;
                        if export.name == METER || export.name == MARK {
                            return Err(unmetered(format!("it exports `{}`", export.name)));
                        }
                    }
                }
                Payload::ElementSection(section) => {
                    for element in section {
                        if let ElementItems::Functions(items) = element.map_err(malformed)?.items {
                            for index in items {
                                taken.push(index.map_err(malformed)?);
                            }
                        }
                    }
                }
                Payload::CodeSectionEntry(body) => {
                    let ty = function_types.get(shape.functions.len()).copied();
                    let ty = ty.ok_or_else(|| unmetered("malformed: a body without a type"))?;
                    let function = shape.outline(ty, &body).map_err(malformed)?;
                    shape.functions.push(function);
                }
                _ => {}
            }
        }
        shape.unify(&types)?;
        shape.is_indirect = vec![false; shape.functions.len()];
        for index in taken {
            if let Some(index) = index.checked_sub(shape.imports) {
                *shape
                    .is_indirect
                    .get_mut(index as usize)
                    .ok_or_else(|| unmetered("malformed: a function index without a function"))? =
                    true;
            }
        }
        Ok(shape)
    }

    /// Names equal types by one index, as indirect calls do not tell them apart.
    fn unify(&mut self, types: &[FuncType]) -> Result<(), SandboxError> {
        let mut firsts = HashMap::new();
        let unified: Vec<u32> = (0..)
            .zip(types)
            .map(|(index, ty)| *firsts.entry(ty).or_insert(index))
            .collect();
        for function in &mut self.functions {
            for ty in std::iter::once(&mut function.ty).chain(&mut function.indirect_calls) {
                *ty = *unified
                    .get(*ty as usize)
                    .ok_or_else(|| unmetered("malformed: a type index without a type"))?;
            }
        }
        Ok(())
    }

    fn outline(&self, ty: u32, body: &FunctionBody<'_>) -> wasmparser::Result<Function> {
        let mut function = Function {
            ty,
            ..Function::default()
        };
        // Open blocks: for a loop, its number.
        let mut blocks: Vec<Option<usize>> = Vec::new();
        let mut operators = body.get_operators_reader()?;
        while !operators.eof() {
            let operator = operators.read()?;
            let innermost = blocks.iter().rev().find_map(|block| *block);
            if !is_free(&operator) {
                function.operators += 1;
                if let Some(index) = innermost {
                    function.loops[index].operators += 1;
                }
            }
            match operator {
                Operator::Loop { .. } => {
                    blocks.push(Some(function.loops.len()));
                    function.loops.push(Loop::default());
                }
                Operator::Block { .. } | Operator::If { .. } => blocks.push(None),
                Operator::End => {
                    blocks.pop();
                }
                Operator::Call { function_index } | Operator::ReturnCall { function_index } => {
                    function.is_marked |= Some(function_index) == self.refill;
                    if let Some(index) = function_index.checked_sub(self.imports) {
                        function.calls.push(index);
                    }
                }
                Operator::CallIndirect { type_index, .. }
                | Operator::ReturnCallIndirect { type_index, .. } => {
                    function.indirect_calls.push(type_index);
                    if let Some(index) = innermost {
                        function.loops[index].has_indirect_call = true;
                    }
                }
                Operator::MemoryCopy { .. } | Operator::MemoryFill { .. } => {
                    function.has_bulk = true;
                }
                _ => {}
            }
        }
        function.calls.sort_unstable();
        function.calls.dedup();
        function.indirect_calls.sort_unstable();
        function.indirect_calls.dedup();
        Ok(function)
    }

    /// Chooses the functions to charge at entry, so that every cycle of the call graph has one.
    ///
    /// Starting from the smallest, for which a charge would weigh most, a function stays free if
    /// it closes no cycle of free ones.
    pub(super) fn charged(&self) -> Vec<bool> {
        let functions = self.functions.len();
        let mut by_type = vec![Vec::new(); self.parameters.len()];
        for (index, function) in self.functions.iter().enumerate() {
            if self.is_indirect[index] {
                by_type[function.ty as usize].push(index);
            }
        }
        let mut order = Vec::from_iter(0..functions);
        order.sort_by_key(|&index| self.functions[index].operators);
        let mut is_free = vec![false; functions];
        // The latest candidate whose search came past a function or a type.
        let mut seen = vec![usize::MAX; functions];
        let mut seen_types = vec![usize::MAX; self.parameters.len()];
        let mut pending = Vec::new();
        for candidate in order {
            let mut closes_cycle = false;
            pending.push(candidate);
            while let Some(index) = pending.pop()
                && !closes_cycle
            {
                let mut visit = |callee: usize| {
                    closes_cycle |= callee == candidate;
                    if is_free[callee] && seen[callee] != candidate {
                        seen[callee] = candidate;
                        pending.push(callee);
                    }
                };
                for &callee in &self.functions[index].calls {
                    visit(callee as usize);
                }
                for &ty in &self.functions[index].indirect_calls {
                    if std::mem::replace(&mut seen_types[ty as usize], candidate) != candidate {
                        by_type[ty as usize].iter().copied().for_each(&mut visit);
                    }
                }
            }
            pending.clear();
            is_free[candidate] = !closes_cycle;
        }
        is_free.into_iter().map(|is_free| !is_free).collect()
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
