//! A small XML tree: libvirt's description of a domain, with bounds on size, depth and number of elements.

use quick_xml::XmlVersion;
use quick_xml::events::{BytesStart, Event};
use quick_xml::name::ResolveResult;
use quick_xml::reader::NsReader;

/// Enough for a domain with thousands of devices.
const BYTES_MAX: usize = 8 << 20;
const DEPTH_MAX: usize = 64;
const ELEMENTS_MAX: usize = 100_000;

/// Why a text could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XmlError {
    /// The text is larger or deeper than any real domain's.
    #[error("more than {limit} {what}")]
    TooLarge {
        /// The limit.
        limit: usize,
        /// What is limited.
        what: &'static str,
    },
    /// The text is not well-formed.
    #[error("not well-formed near byte {at}: {cause}")]
    Malformed {
        /// Position in bytes.
        at: u64,
        /// The parser's message.
        cause: String,
    },
}

/// One element.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Element {
    /// Name without prefix.
    pub name: String,
    /// Namespace, if the element has one.
    pub namespace: Option<String>,
    /// Attributes by their names as written.
    pub attributes: Vec<(String, String)>,
    /// Text directly in the element.
    pub text: String,
    /// Elements directly in the element.
    pub children: Vec<Element>,
}

impl Element {
    /// Value of an attribute.
    pub(crate) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }

    /// The first child with this name and no namespace.
    pub(crate) fn child(&self, name: &str) -> Option<&Element> {
        self.children
            .iter()
            .find(|child| child.name == name && child.namespace.is_none())
    }

    /// The element at the end of this path of child names.
    pub(crate) fn path(&self, names: &[&str]) -> Option<&Element> {
        names.iter().try_fold(self, |element, name| element.child(name))
    }

    /// All children with this name and no namespace.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Element> {
        self.children
            .iter()
            .filter(move |child| child.name == name && child.namespace.is_none())
    }
}

/// Parses a document and returns its root element.
pub(crate) fn parse(text: &str) -> Result<Element, XmlError> {
    if text.len() > BYTES_MAX {
        return Err(XmlError::TooLarge {
            limit: BYTES_MAX,
            what: "bytes",
        });
    }
    let mut reader = NsReader::from_str(text);
    let mut open: Vec<Element> = Vec::new();
    let mut count = 0;
    loop {
        let at = reader.buffer_position();
        let malformed = |cause: String| XmlError::Malformed { at, cause };
        let (namespace, event) = reader
            .read_resolved_event()
            .map_err(|e| malformed(e.to_string()))?;
        let namespace = match namespace {
            ResolveResult::Bound(namespace) => Some(namespace.as_ref().to_owned()),
            ResolveResult::Unbound => None,
            ResolveResult::Unknown(prefix) => Some(format!("unbound prefix {prefix}")),
        };
        let is_empty = matches!(event, Event::Empty(_));
        match event {
            Event::Start(start) | Event::Empty(start) => {
                count += 1;
                if count > ELEMENTS_MAX {
                    return Err(XmlError::TooLarge {
                        limit: ELEMENTS_MAX,
                        what: "elements",
                    });
                }
                if open.len() >= DEPTH_MAX {
                    return Err(XmlError::TooLarge {
                        limit: DEPTH_MAX,
                        what: "levels",
                    });
                }
                let element = element(&start, namespace, malformed)?;
                open.push(element);
                if is_empty && let Some(root) = close(&mut open) {
                    return Ok(root);
                }
            }
            Event::End(_) => {
                if let Some(root) = close(&mut open) {
                    return Ok(root);
                }
            }
            Event::Text(text) => append(&mut open, &text.xml10_content()),
            Event::CData(text) => append(&mut open, &text.xml10_content()),
            Event::GeneralRef(reference) => {
                let character = reference
                    .resolve_char_ref()
                    .map_err(|e| malformed(e.to_string()))?;
                let name = reference.xml10_content();
                match (character, quick_xml::escape::resolve_predefined_entity(&name)) {
                    (Some(c), _) => append(&mut open, c.encode_utf8(&mut [0; 4])),
                    (None, Some(text)) => append(&mut open, text),
                    (None, None) => return Err(malformed(format!("unknown entity `{name}`"))),
                }
            }
            Event::Eof => return Err(malformed("the text ends before its root element does".into())),
            Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::DocType(_) => {}
        }
    }
}

/// Closes the innermost open element. Adds it to its parent, or returns it if it is the root.
fn close(open: &mut Vec<Element>) -> Option<Element> {
    let done = open.pop()?;
    match open.last_mut() {
        Some(parent) => parent.children.push(done),
        None => return Some(done),
    }
    None
}

fn append(open: &mut [Element], text: &str) {
    if let Some(element) = open.last_mut() {
        element.text.push_str(text);
    }
}

fn element(
    start: &BytesStart<'_>,
    namespace: Option<String>,
    malformed: impl Fn(String) -> XmlError,
) -> Result<Element, XmlError> {
    let mut attributes = Vec::new();
    for attribute in start.attributes() {
        let attribute = attribute.map_err(|e| malformed(e.to_string()))?;
        let name: &str = attribute.key.as_ref();
        let value = attribute
            .normalized_value(XmlVersion::Implicit1_0)
            .map_err(|e| malformed(e.to_string()))?;
        attributes.push((name.to_owned(), value.into_owned()));
    }
    let name: &str = start.local_name().into_inner();
    Ok(Element {
        name: name.to_owned(),
        namespace,
        attributes,
        ..Element::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_tree_with_namespaces_and_entities() {
        let text = "<?xml version='1.0'?><!-- x --><a n='1 &lt; 2'><b>x &amp; &#65;<![CDATA[<]]></b><p:c xmlns:p='urn:x' k='v'/><b/></a>";
        let root = parse(text).unwrap();
        assert_eq!(root.attribute("n"), Some("1 < 2"));
        assert_eq!(root.child("b").unwrap().text, "x & A<");
        assert_eq!(root.all("b").count(), 2);
        assert_eq!(root.child("c"), None, "it has a namespace");
        assert_eq!(root.children[1].namespace.as_deref(), Some("urn:x"));
    }

    #[test]
    fn hostile_text_is_refused() {
        let deep = "<a>".repeat(100);
        let bomb = "<!DOCTYPE a [<!ENTITY b 'bb'>]><a>&b;</a>";
        for bad in [
            "",
            "<a>",
            "<a></b>",
            "text",
            "<a x='1' x='2'/>",
            "<a>&b;</a>",
            &deep,
            bomb,
            "<a x=&/>",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let wide = format!("<a>{}</a>", "<b/>".repeat(ELEMENTS_MAX + 1));
        assert_eq!(
            parse(&wide),
            Err(XmlError::TooLarge {
                limit: ELEMENTS_MAX,
                what: "elements"
            })
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[<>/a='\" &;!\\[\\]-]{0,40}|\\PC{0,30}") {
            let _ = parse(&text);
        }
    }
}
