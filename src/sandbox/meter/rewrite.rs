//! Inserts the charges.

use std::convert::Infallible;

use wasm_encoder::reencode::{Error, Reencode, utils};
use wasm_encoder::{
    BlockType, CodeSection, ConstExpr, EntityType, ExportKind, ExportSection, Function,
    GlobalSection, GlobalType, ImportSection, Module, SectionId, TypeSection, ValType,
};
use wasmparser::{
    CustomSectionReader, ExportSectionReader, FunctionBody, GlobalSectionReader,
    ImportSectionReader, Operator, Parser, TypeSectionReader,
};

use super::outline;
use super::shape::{Shape, Weight};
use super::{
    BULK_SHIFT, GROWTH, HEAVIEST, HOST_CALL, LARGE, MARK, MARKED, METER, REFILL, malformed,
};
use crate::sandbox::error::SandboxError;

/// Returns the module with its charges, and without its custom sections.
pub(super) fn rewrite(wasm: &[u8], shape: &Shape) -> Result<Vec<u8>, SandboxError> {
    let charged = shape.charged();
    let mut rewriter = Rewriter {
        shape,
        weights: shape.weigh(&charged),
        charged,
        refill: shape.refill.unwrap_or(shape.imports),
        meter: shape.globals,
        mark: shape.globals + 1,
        next: 0,
    };
    let mut module = Module::new();
    rewriter
        .parse_core_module(&mut module, Parser::new(0), wasm)
        .map_err(malformed)?;
    Ok(module.finish())
}

struct Rewriter<'a> {
    shape: &'a Shape,
    /// The functions that are charged at entry.
    charged: Vec<bool>,
    weights: Vec<Weight>,
    refill: u32,
    meter: u32,
    mark: u32,
    /// The next body's number.
    next: usize,
}

/// What happens when a charge finds too little.
#[derive(Clone, Copy)]
enum Otherwise {
    Trap,
    Ask,
}

type Rewritten = Result<(), Error<Infallible>>;

impl Reencode for Rewriter<'_> {
    type Error = Infallible;

    fn function_index(&mut self, index: u32) -> Result<u32, Error<Infallible>> {
        let is_behind = self.shape.refill.is_none() && index >= self.shape.imports;
        Ok(index + u32::from(is_behind))
    }

    fn parse_type_section(
        &mut self,
        types: &mut TypeSection,
        section: TypeSectionReader<'_>,
    ) -> Rewritten {
        utils::parse_type_section(self, types, section)?;
        if self.shape.empty_type.is_none() {
            types.ty().function([], []);
        }
        Ok(())
    }

    fn parse_import_section(
        &mut self,
        imports: &mut ImportSection,
        section: ImportSectionReader<'_>,
    ) -> Rewritten {
        utils::parse_import_section(self, imports, section)?;
        self.import_refill(imports);
        Ok(())
    }

    fn intersperse_section_hook(
        &mut self,
        module: &mut Module,
        after: Option<SectionId>,
        before: Option<SectionId>,
    ) -> Rewritten {
        // A module without imports has no section for them.
        if after == Some(SectionId::Type) && before != Some(SectionId::Import) {
            let mut imports = ImportSection::new();
            self.import_refill(&mut imports);
            module.section(&imports);
        }
        Ok(())
    }

    fn parse_global_section(
        &mut self,
        globals: &mut GlobalSection,
        section: GlobalSectionReader<'_>,
    ) -> Rewritten {
        utils::parse_global_section(self, globals, section)?;
        let ty = GlobalType {
            val_type: ValType::I64,
            mutable: true,
            shared: false,
        };
        globals.global(ty, &ConstExpr::i64_const(0));
        globals.global(ty, &ConstExpr::i64_const(0));
        Ok(())
    }

    fn parse_export_section(
        &mut self,
        exports: &mut ExportSection,
        section: ExportSectionReader<'_>,
    ) -> Rewritten {
        utils::parse_export_section(self, exports, section)?;
        exports.export(METER, ExportKind::Global, self.meter);
        exports.export(MARK, ExportKind::Global, self.mark);
        Ok(())
    }

    fn parse_custom_section(&mut self, _: &mut Module, _: CustomSectionReader<'_>) -> Rewritten {
        Ok(())
    }

    fn parse_function_body(&mut self, code: &mut CodeSection, body: FunctionBody<'_>) -> Rewritten {
        let index = self.next;
        self.next += 1;
        let outline = &self.shape.functions[index];

        let mut locals = Vec::new();
        let mut length = self.shape.parameters[outline.ty as usize];
        for run in body.get_locals_reader()? {
            let (count, ty) = run?;
            length += count;
            locals.push((count, self.val_type(ty)?));
        }
        if outline.has_bulk {
            locals.push((1, ValType::I32));
        }
        let mut function = Function::new(locals);
        if self.charged[index] {
            let units = units(self.weights[index]);
            let asks = units >= LARGE || self.shape.recurs(index);
            self.charge(&mut function, units, Otherwise::ask_if(asks));
        }
        let mut loops = outline.loops.iter();
        let mut operators = body.get_operators_reader()?;
        while !operators.eof() {
            let operator = operators.read()?;
            let is_loop = matches!(operator, Operator::Loop { .. });
            match operator {
                Operator::Call { function_index } if Some(function_index) == self.shape.refill => {
                    self.charge(&mut function, MARKED, Otherwise::Ask);
                    continue;
                }
                Operator::Call { function_index } | Operator::ReturnCall { function_index }
                    if function_index < self.shape.imports =>
                {
                    self.charge(&mut function, HOST_CALL, Otherwise::Trap);
                }
                Operator::MemoryGrow { .. } => {
                    self.charge(&mut function, GROWTH, Otherwise::Trap);
                }
                Operator::MemoryCopy { .. } | Operator::MemoryFill { .. } => {
                    self.charge_bulk(&mut function, length);
                }
                _ => {}
            }
            function.instruction(&self.instruction(operator)?);
            if is_loop {
                let outline = loops.next().expect("counted before");
                if !outline.is_marked {
                    let (units, otherwise) = self.iteration(outline);
                    self.charge(&mut function, units, otherwise);
                }
            }
        }
        code.function(&function);
        Ok(())
    }
}

impl Rewriter<'_> {
    fn import_refill(&self, imports: &mut ImportSection) {
        if self.shape.refill.is_none() {
            let types = u32::try_from(self.shape.parameters.len()).expect("indices are 32 bits");
            let ty = self.shape.empty_type.unwrap_or(types);
            imports.import(REFILL.0, REFILL.1, EntityType::Function(ty));
        }
    }

    /// Weighs a loop.
    ///
    /// The host is asked in loops that call far, hold other loops or are large. The rest are scans
    /// and copies, which memory bounds.
    fn iteration(&self, outline: &outline::Loop) -> (u32, Otherwise) {
        let weight = Weight::of(&outline.work, &self.charged, |callee| self.weights[callee]);
        let units = units(weight);
        let asks = weight.calls_far || outline.has_loop || units >= LARGE;
        (units, Otherwise::ask_if(asks))
    }

    fn charge(&self, function: &mut Function, weight: u32, otherwise: Otherwise) {
        function
            .instructions()
            .global_get(self.meter)
            .i64_const(weight.into())
            .i64_sub()
            .global_set(self.meter)
            .global_get(self.meter);
        self.settle(function, otherwise);
    }

    /// Charges for the length on top of the stack and leaves it there.
    fn charge_bulk(&self, function: &mut Function, length: u32) {
        function
            .instructions()
            .local_tee(length)
            .global_get(self.meter)
            .local_get(length)
            .i64_extend_i32_u()
            .i64_const(BULK_SHIFT.into())
            .i64_shr_u()
            .i64_sub()
            .global_set(self.meter)
            .global_get(self.meter);
        self.settle(function, Otherwise::Trap);
    }

    /// Compares the meter, which is on the stack.
    fn settle(&self, function: &mut Function, otherwise: Otherwise) {
        let mut sink = function.instructions();
        match otherwise {
            Otherwise::Trap => sink.i64_const(0),
            Otherwise::Ask => sink.global_get(self.mark),
        };
        sink.i64_lt_s().if_(BlockType::Empty);
        match otherwise {
            Otherwise::Trap => sink.unreachable(),
            Otherwise::Ask => sink.call(self.refill),
        };
        sink.end();
    }
}

impl Otherwise {
    fn ask_if(condition: bool) -> Self {
        if condition { Self::Ask } else { Self::Trap }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to a range of u32"
)]
fn units(weight: Weight) -> u32 {
    weight.operators.round().clamp(1.0, HEAVIEST.into()) as u32
}
