//! The rule on long functions.

use proc_macro2::Span;
use syn::spanned::Spanned as _;
use syn::visit::Visit;
use syn::{Block, ImplItemFn, ItemFn, Signature, TraitItemFn};

use super::Finding;
use super::syntax::shipped;
use super::tree::Workspace;

const FUNCTION_LINES_MAX: usize = 80;

/// Finds long functions in shipped code. Length is counted in lines from `fn` to the last brace, including comments and nested
/// functions.
pub(super) fn long_functions(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in shipped(workspace) {
        let mut long = Long(Vec::new());
        long.visit_file(&source.syntax);
        findings.extend(long.0.into_iter().map(|(line, name, lines)| {
            source.file.at_line(
                line - 1,
                format!("'{name}' has {lines} lines: give its parts names of their own"),
            )
        }));
    }
    findings
}

/// The long functions found so far: first line, name and number of lines of each.
struct Long(Vec<(usize, String, usize)>);

impl Long {
    fn look(&mut self, signature: &Signature, end: Span) {
        let first = signature.fn_token.span().start().line;
        let lines = end.end().line + 1 - first;
        if lines > FUNCTION_LINES_MAX {
            self.0.push((first, signature.ident.to_string(), lines));
        }
    }

    fn look_at(&mut self, signature: &Signature, block: &Block) {
        self.look(signature, block.brace_token.span.close());
    }
}

impl<'ast> Visit<'ast> for Long {
    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.look_at(&function.sig, &function.block);
        syn::visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        self.look_at(&function.sig, &function.block);
        syn::visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast TraitItemFn) {
        if let Some(block) = &function.default {
            self.look_at(&function.sig, block);
        }
        syn::visit::visit_trait_item_fn(self, function);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::crates::tests::places;
    use crate::rules::tree::SourceFile;

    fn found(text: &str) -> Vec<String> {
        let files = vec![SourceFile::new("crates/a/src/lib.rs", text)];
        places(long_functions(&Workspace {
            files,
            ..Workspace::default()
        }))
    }

    #[test]
    fn long_functions_finds_those_of_81_lines_and_no_tests() {
        let lines = |count: usize| "    // a line\n".repeat(count);
        let function = |count: usize| format!("/// Long.\nfn f() {{\n{}}}\n", lines(count));
        assert_eq!(found(&function(79)), ["crates/a/src/lib.rs:2"]);
        assert_eq!(found(&function(78)), [""; 0]);
        assert_eq!(
            found(&format!("impl A {{\n{}}}\n", function(79))),
            ["crates/a/src/lib.rs:3"]
        );
        assert_eq!(
            found(&format!("trait A {{ fn g();\n{}}}\n", function(79))),
            ["crates/a/src/lib.rs:3"]
        );
        assert_eq!(
            found(&format!("#[cfg(test)]\nmod tests {{\n{}}}\n", function(79))),
            [""; 0]
        );
    }
}
