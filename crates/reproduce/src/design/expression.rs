//! The expressions of an experiment: `below(speed, speed[system='Xen'])`, `max(loss, program)`.
//!
//! ```text
//!   or      a or b                    (1 where either is not 0)
//!   and     a and b, not a
//!   test    a < b, <=, >, >=, ==, !=
//!   sum     a + b, a - b
//!   product a * b, a / b, a % b, -a
//!   part    a[axis='label'], a[axis=['one', 'two']], a[axis!='label'], a[axis=other]
//!   atom    1.5, 'a word', name, function(a, …), (a)
//! ```
//!
//! A part with one label loses that axis. An expression after `=` yields the label, place by place. There are no variables,
//! loops or user-defined functions: an experiment that needs them is written in code.

/// Maximum number of tokens of an expression, and of nesting levels: parsing and evaluation are recursive.
const TOKENS_MAX: usize = 1_000;
const DEPTH_MAX: u32 = 64;
/// A 64-bit number has no more significant digits.
const DIGITS_MAX: usize = 17;

/// An expression.
#[derive(Clone, Debug, PartialEq)]
pub enum Expression {
    /// A number.
    Number(f64),
    /// A word.
    Text(String),
    /// A value, a metric, an axis.
    Name(String),
    /// An operator or a function, and what it is applied to.
    Call(String, Vec<Expression>),
    /// A part: the array, the axis, and its labels.
    Part(Box<Expression>, String, Which),
}

/// Which labels of an axis.
#[derive(Clone, Debug, PartialEq)]
pub enum Which {
    /// One label only: the axis is dropped.
    One(Box<Expression>),
    /// These labels.
    Some(Vec<String>),
    /// All but these.
    But(Vec<String>),
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Number(f64),
    Text(String),
    Name(String),
    Sign(&'static str),
}

const SIGNS: [&str; 17] = [
    "<=", ">=", "==", "!=", "<", ">", "=", "+", "-", "*", "/", "%", "(", ")", "[", "]", ",",
];

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut rest = text.trim_start();
    let mut found = Vec::new();
    while let Some(first) = rest.chars().next() {
        let run = |rest: &str, more: fn(char) -> bool| rest.find(|c| !more(c)).unwrap_or(rest.len());
        let length;
        if first == '\'' {
            let end = rest[1..].find('\'').ok_or("a word in quotes has no end")?;
            found.push(Token::Text(rest[1..=end].to_owned()));
            length = end + 2;
        } else if first.is_ascii_digit() {
            length = run(rest, |c| c.is_ascii_digit() || c == '.');
            let number = rest[..length].parse();
            found.push(Token::Number(
                number.map_err(|_| format!("`{}` is no number", &rest[..length]))?,
            ));
        } else if first.is_alphabetic() || first == '_' {
            length = run(rest, |c| c.is_alphanumeric() || c == '_' || c == '.');
            found.push(Token::Name(rest[..length].to_owned()));
        } else {
            let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
            let sign = sign.ok_or_else(|| format!("`{first}` stands for nothing in an expression"))?;
            found.push(Token::Sign(sign));
            length = sign.len();
        }
        rest = rest[length..].trim_start();
    }
    Ok(found)
}

/// Operators by precedence, the lowest first.
const OPERATORS: [&[&str]; 5] = [
    &["or"],
    &["and"],
    &["<", "<=", ">", ">=", "==", "!="],
    &["+", "-"],
    &["*", "/", "%"],
];

/// The precedence level of `not`: below tests, above `and`.
const NOT: usize = 2;

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: u32,
}

impl Expression {
    /// Parses an expression.
    ///
    /// # Errors
    /// A message about what is wrong.
    pub fn parse(text: &str) -> Result<Expression, String> {
        let wrong = |what: String| format!("{what} (in `{}`)", text.trim());
        let mut parser = Parser {
            tokens: tokens(text).map_err(wrong)?,
            at: 0,
            depth: 0,
        };
        if parser.tokens.len() > TOKENS_MAX {
            return Err(format!(
                "an expression has at most {TOKENS_MAX} words and signs: give parts of it names in `values`"
            ));
        }
        let whole = parser.operation(0).map_err(wrong)?;
        match parser.tokens.get(parser.at) {
            None => Ok(whole),
            Some(token) => Err(wrong(format!("{} is not expected here", token.shown()))),
        }
    }

    /// Returns the names that it refers to.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Expression::Number(_) | Expression::Text(_) => Vec::new(),
            Expression::Name(name) => vec![name],
            Expression::Call(_, of) => of.iter().flat_map(Expression::names).collect(),
            Expression::Part(of, _, Which::One(which)) => [of.names(), which.names()].concat(),
            Expression::Part(of, ..) => of.names(),
        }
    }
}

impl Token {
    fn shown(&self) -> String {
        match self {
            Token::Number(number) => format!("{number}"),
            Token::Text(text) => format!("'{text}'"),
            Token::Name(name) => format!("`{name}`"),
            Token::Sign(sign) => format!("`{sign}`"),
        }
    }
}

impl Parser {
    fn takes(&mut self, sign: &str) -> bool {
        let is = match self.tokens.get(self.at) {
            Some(Token::Sign(own)) => *own == sign,
            Some(Token::Name(name)) => name == sign,
            _ => false,
        };
        self.at += usize::from(is);
        is
    }

    fn expects(&mut self, sign: &str) -> Result<(), String> {
        if self.takes(sign) {
            return Ok(());
        }
        let found = self
            .tokens
            .get(self.at)
            .map_or("the end".to_owned(), Token::shown);
        Err(format!("`{sign}` is expected before {found}"))
    }

    fn operation(&mut self, level: usize) -> Result<Expression, String> {
        let Some(operators) = OPERATORS.get(level) else {
            return self.unary();
        };
        if level == NOT && self.takes("not") {
            let of = self.deeper(|parser| parser.operation(level))?;
            return Ok(Expression::Call("not".to_owned(), vec![of]));
        }
        let mut left = self.operation(level + 1)?;
        while let Some(operator) = operators.iter().find(|operator| self.takes(operator)) {
            let right = self.operation(level + 1)?;
            left = Expression::Call((*operator).to_owned(), vec![left, right]);
        }
        Ok(left)
    }

    fn deeper(
        &mut self,
        read: impl Fn(&mut Parser) -> Result<Expression, String>,
    ) -> Result<Expression, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!("it is nested deeper than {DEPTH_MAX}"));
        }
        let found = read(self);
        self.depth -= 1;
        found
    }

    fn unary(&mut self) -> Result<Expression, String> {
        if self.takes("-") {
            let of = self.deeper(Parser::unary)?;
            return Ok(Expression::Call("minus".to_owned(), vec![of]));
        }
        let mut whole = self.atom()?;
        while self.takes("[") {
            loop {
                whole = self.part(whole)?;
                if !self.takes(",") {
                    break;
                }
            }
            self.expects("]")?;
        }
        Ok(whole)
    }

    fn part(&mut self, of: Expression) -> Result<Expression, String> {
        let Some(Token::Name(axis)) = self.tokens.get(self.at).cloned() else {
            return Err("an axis is expected behind `[`: write `value[axis='label']`".to_owned());
        };
        self.at += 1;
        let but = self.takes("!=");
        if !but {
            self.expects("=")?;
        }
        let which = if self.takes("[") {
            let labels = self.labels()?;
            if but {
                Which::But(labels)
            } else {
                Which::Some(labels)
            }
        } else {
            match self.deeper(|parser| parser.operation(0))? {
                Expression::Text(label) if but => Which::But(vec![label]),
                which => Which::One(Box::new(which)),
            }
        };
        Ok(Expression::Part(Box::new(of), axis, which))
    }

    fn labels(&mut self) -> Result<Vec<String>, String> {
        let mut labels = Vec::new();
        while !self.takes("]") {
            match self.tokens.get(self.at) {
                Some(Token::Text(label)) => labels.push(label.clone()),
                Some(Token::Number(number)) => labels.push(number.to_string()),
                _ => return Err("a list has labels in quotes: `['one', 'two']`".to_owned()),
            }
            self.at += 1;
            self.takes(",");
        }
        Ok(labels)
    }

    fn atom(&mut self) -> Result<Expression, String> {
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        match token {
            Some(Token::Number(number)) => Ok(Expression::Number(number)),
            Some(Token::Text(text)) => Ok(Expression::Text(text)),
            Some(Token::Name(name)) if self.takes("(") => {
                let mut given = Vec::new();
                while !self.takes(")") {
                    given.push(self.deeper(|parser| parser.operation(0))?);
                    if !self.takes(",") {
                        self.expects(")")?;
                        break;
                    }
                }
                Ok(Expression::Call(name, given))
            }
            Some(Token::Name(name)) => Ok(Expression::Name(name)),
            Some(Token::Sign("(")) => {
                let inner = self.deeper(|parser| parser.operation(0))?;
                self.expects(")")?;
                Ok(inner)
            }
            Some(token) => Err(format!("{} is not expected here", token.shown())),
            None => Err("something is missing at the end".to_owned()),
        }
    }
}

/// A text with expressions in braces, split into parts: `{gain} percent`.
#[derive(Clone, Debug, PartialEq)]
pub struct Template(Vec<Piece>);

#[derive(Clone, Debug, PartialEq)]
enum Piece {
    Plain(String),
    /// An expression, and the number of decimals, unless chosen by size.
    Of(Expression, Option<usize>),
}

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// An unmatched brace; an invalid expression between braces.
    pub fn parse(text: &str) -> Result<Template, String> {
        let (mut pieces, mut rest) = (Vec::new(), text);
        while let Some(open) = rest.find('{') {
            let close = rest[open..].find('}').ok_or("`{` has no `}`")? + open;
            let inner = &rest[open + 1..close];
            let (inner, digits) = match inner.rsplit_once(":.") {
                Some((inner, digits)) => {
                    let digits: Option<usize> = digits.parse().ok().filter(|digits| *digits <= DIGITS_MAX);
                    let said =
                        || format!("`{{{inner}:.…}}` ends with how many digits: a number up to {DIGITS_MAX}");
                    (inner, Some(digits.ok_or_else(said)?))
                }
                None => (inner, None),
            };
            pieces.push(Piece::Plain(rest[..open].to_owned()));
            pieces.push(Piece::Of(Expression::parse(inner)?, digits));
            rest = &rest[close + 1..];
        }
        pieces.push(Piece::Plain(rest.to_owned()));
        Ok(Template(pieces))
    }

    /// Returns the text, with each expression formatted by a function.
    ///
    /// # Errors
    /// The function's.
    pub fn filled(
        &self,
        mut shown: impl FnMut(&Expression, Option<usize>) -> Result<String, String>,
    ) -> Result<String, String> {
        let pieces = self.0.iter().map(|piece| match piece {
            Piece::Plain(text) => Ok(text.clone()),
            Piece::Of(expression, digits) => shown(expression, *digits),
        });
        pieces.collect()
    }

    /// Returns the names that it refers to.
    pub fn names(&self) -> Vec<&str> {
        let names = self.0.iter().map(|piece| match piece {
            Piece::Plain(_) => Vec::new(),
            Piece::Of(expression, _) => expression.names(),
        });
        names.flatten().collect()
    }
}
