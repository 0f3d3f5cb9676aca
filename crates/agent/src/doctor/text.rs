//! Formats the result of `homenode doctor` for people.

use super::{Examined, Feature};

/// Column where findings begin.
const INDENT: usize = 19;
/// Column where a remedy begins; terminals are assumed to be at least 20 columns wide.
const REMEDY_AT: usize = 4;

/// How much detail to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// One screen: features that are present, those that can be had and how, and those out of reach.
    Screen,
    /// Everything: features that are present, then the missing ones, each followed by its remedy.
    All,
}

/// A paragraph, to be wrapped to the width of the terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paragraph {
    /// The text, without line breaks.
    pub text: String,
    /// Column where the first line begins.
    pub left: usize,
    /// Indentation of the paragraph's lines after the first.
    pub hang: usize,
}

fn paragraph(text: String, hang: usize) -> Paragraph {
    Paragraph { text, left: 0, hang }
}

/// Returns a paragraph that begins with a name.
fn named(name: &str, text: &str) -> Paragraph {
    paragraph(format!("{name:<18} {text}"), INDENT)
}

impl Examined {
    /// Returns the paragraphs that describe the host.
    pub fn paragraphs(&self, detail: Detail) -> Vec<Paragraph> {
        let (there, missing): (Vec<&Feature>, Vec<&Feature>) = self.features.iter().partition(|one| one.has);
        let machine = self.machine.as_deref().unwrap_or("a host that cannot be read");
        let more = match detail {
            Detail::Screen => "; 'homenode doctor --all' describes each",
            Detail::All => "",
        };
        let (has, of) = (there.len(), self.features.len());
        let mut all = vec![paragraph(
            format!("{machine}: {has} of {of} features are present{more}"),
            2,
        )];
        if !self.kernel.is_unknown() {
            all.push(named("kernel", &self.kernel.to_string()));
        }
        match detail {
            Detail::Screen => screen(&mut all, &there, &missing),
            Detail::All => each(&mut all, &there, &missing),
        }
        all
    }
}

fn screen(all: &mut Vec<Paragraph>, there: &[&Feature], missing: &[&Feature]) {
    let (lost, to_get): (Vec<&Feature>, Vec<&Feature>) =
        missing.iter().partition(|one| one.is_out_of_reach());
    // Features that concern the VMs' hypervisor are shown with what was found, the others only by name.
    let (vms, others): (Vec<&Feature>, Vec<&Feature>) = there.iter().partition(|one| one.is_of_vms());
    all.extend(vms.iter().map(|one| named(one.feature, &one.found)));
    for (name, features) in [("present", others), ("not on this host", lost)] {
        let names: Vec<&str> = features.iter().map(|one| one.feature).collect();
        if !names.is_empty() {
            all.push(named(name, &names.join(", ")));
        }
    }
    for one in to_get {
        let costs = one.costs.unwrap_or_default();
        let remedy = one.remedy.as_deref().unwrap_or_default();
        all.push(named(one.feature, &format!("{costs} -> {remedy}")));
    }
}

fn each(all: &mut Vec<Paragraph>, there: &[&Feature], missing: &[&Feature]) {
    all.extend(there.iter().map(|one| named(one.feature, &one.found)));
    if !missing.is_empty() {
        let text = "missing, with what their absence costs and how to get them:";
        all.push(paragraph(text.to_owned(), 0));
    }
    for one in missing {
        let costs = one.costs.unwrap_or_default();
        all.push(named(one.feature, &format!("{}; {costs}", one.found)));
        all.extend(one.remedy.as_ref().map(|remedy| Paragraph {
            text: format!("-> {remedy}"),
            left: REMEDY_AT,
            hang: "-> ".len(),
        }));
    }
}
